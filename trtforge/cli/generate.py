"""`trtforge generate`: the embedded engine without a server."""

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import show
from trtforge.cli.guide import Grammar, JsonSchema, Regex, guide_of
from trtforge.cli.options import Json, MaxTokens, Seed, Stop, Temperature, TopK, TopP, Verbose


def generate(
    engine: Annotated[
        Path,
        typer.Argument(
            metavar="ENGINE", help="Torch engine, or a build directory or repository with one.", show_default=False
        ),
    ],
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="Prompt text; - reads it from standard input.", show_default=False),
    ],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace of every iteration, to view at https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run the embedded engine in this process, without a server.

    Example: trtforge generate build/demo-int4awq/engine "Return the number of"

    Example: trtforge generate build/demo-int4awq/engine "Is a list mutable?" --regex "yes|no"
    """
    from trtforge.cli.places import artifact_at
    from trtforge.cli.prompt import prompt_text, require_utf8
    from trtforge.engine_process.requests import SamplingParams
    from trtforge.runtime.text import generate_text
    from trtforge.serve.request import Generated, Sampling, answer_warnings, request_warnings

    words = tuple(stop or ())
    require_utf8(*words)
    asked = Sampling(max_tokens, temperature, top_k, top_p, seed, stop=words)
    for warning in request_warnings(asked):
        show.warning(warning)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    guide = guide_of(json_schema, regex, grammar)
    place, text = artifact_at(engine, "engine"), prompt_text(prompt)
    answer = generate_text(place, text, max_tokens=max_tokens, sampling=sampling, stop=words, guide=guide, trace=trace)
    if json:
        show.as_json(vars(answer))
    else:
        print(answer.text)
    said = Generated(answer.text, None, len(answer.tokens), answer.seconds, answer.seconds, answer.finish_reason)
    for warning in answer_warnings(asked, said):
        show.warning(warning)
