"""Tells misspelled inputs from parameters of a client's own.

Triton's generate endpoint makes a parameter of every name that is no input of the model, and models ignore parameters:
a misspelled option would be left out without a word.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from responder import RequestFailed

REQUEST_TYPE, PHASE = "request_type", "context_phase_params"
"""Of disaggregated serving. The first is a parameter of engine models, as in TensorRT-LLM, an input of text models."""
CONTEXT_ONLY = "context_only"
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_TRITONS_OWN = frozenset(("sequence_id", "sequence_start", "sequence_end", "priority", "timeout"))
"""Parameters that Triton takes itself (server, docs/protocol/extension_parameters.md)."""
SAMPLING = ("min_p", "no_repeat_ngram_size", "prompt_ignore_length")
"""Parts of TensorRT-LLM's SamplingConfig that its Triton models have no tensors for."""
_OF_TEXT_MODELS = frozenset(("cache_salt", *SAMPLING))
"""Inputs of text models only. Whoever sends one elsewhere relies on it, so it is not ignored as others are."""
_NEAR = 0.8  # of difflib's ratio: one letter of four may be wrong
_MOST_PARAMETERS = 64
"""Comparing a name with those of the inputs takes a fraction of a millisecond, for which other requests wait."""
_LONGEST_NAME = 64  # characters that are compared: all names of inputs are much shorter


class InputNames:
    """The inputs of a model. `elsewhere`: names that other models have for some of them."""

    def __init__(self, known: Collection[str], elsewhere: Mapping[str, str]) -> None:
        self._known = frozenset(known)
        self._elsewhere = {theirs: ours for theirs, ours in elsewhere.items() if theirs not in self._known}

    def check(self, parameters: Collection[str]) -> None:
        """Raises RequestFailed for a parameter that is meant to be an input, and for too many parameters."""
        if len(parameters) > _MOST_PARAMETERS:
            raise RequestFailed(f"the request has {len(parameters)} parameters; at most {_MOST_PARAMETERS} are allowed")
        for name in parameters:
            if name in _TRITONS_OWN or (name == REQUEST_TYPE and name not in self._known):
                continue
            if name in self._known:
                raise RequestFailed(f"{name} is an input of this model, not a parameter")
            if name in _OF_TEXT_MODELS:
                raise RequestFailed(f"{name} is an input of the text models only, such as ensemble")
            meant = self._elsewhere.get(name) or next(
                iter(get_close_matches(name[:_LONGEST_NAME], {*self._known, REQUEST_TYPE}, 1, _NEAR)), None
            )
            if meant is not None:
                raise RequestFailed(f"{name} is no input of this model; did you mean {meant}?")
