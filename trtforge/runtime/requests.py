"""Names that model repositories packaged by trtforge 0.1 import from here."""

from trtforge.engine_process.requests import FinishReason, GenerationRequest, Output, SamplingParams

__all__ = ["FinishReason", "GenerationRequest", "Output", "SamplingParams"]
