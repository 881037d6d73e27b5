"""The verify stage: `transformers` on the Hugging Face model against the runtime on the converted ranks."""

from pathlib import Path

from trtforge.core.manifest import open_artifact
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import GateConfig
from trtforge.formats.corpus import TokenWindows, token_windows
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import is_engine, rank_file, read_checkpoint_config, read_engine_config
from trtforge.verify.result import Perplexity, Verification, failures


def verify(candidate: Path, reference: Path, gate: GateConfig, *, progress: Progress | None = None) -> Verification:
    """Compare `candidate` (a checkpoint or a torch engine) with the Hugging Face model at `reference`, in float32.

    Raises ForgeError for a damaged or foreign artifact and for data that cannot be used; a gate that does not hold is
    not an error but a result with `failures`.
    """
    engine = is_engine(candidate)
    open_artifact(candidate, "engine" if engine else "checkpoint")
    config = read_engine_config(candidate)[0] if engine else read_checkpoint_config(candidate)
    windows = token_windows(
        gate.data,
        reference,
        samples=gate.samples,
        length=gate.sequence_length,
        vocab_size=config.vocab_size,
        seed=0,
    )
    tensors = sum(len(read_header(candidate / rank_file(rank.index))) for rank in config.parallel.ranks)
    return _compare(candidate, reference, gate, windows, tensors, progress or Silent())


def _compare(
    candidate: Path, reference: Path, gate: GateConfig, windows: TokenWindows, tensors: int, progress: Progress
) -> Verification:
    import torch

    from trtforge.runtime.runner import open_runner
    from trtforge.verify.comparison import Comparison
    from trtforge.verify.reference import load_reference

    comparison = Comparison()
    model = load_reference(reference)
    with (
        open_runner(candidate, device="cpu", compute_dtype="float32") as runner,
        torch.inference_mode(),
        progress.bar("Verifying", len(windows.windows), "windows") as bar,
    ):
        for window in windows.windows:
            ids = torch.tensor(window)
            comparison.add(model.logits(ids), runner.logits(list(window)), ids)
            bar.advance(1)
    perplexity = Perplexity(reference=comparison.reference_perplexity, candidate=comparison.candidate_perplexity)
    agreement, divergence = comparison.agreements / comparison.tokens, comparison.divergence / comparison.tokens
    return Verification(
        perplexity=perplexity,
        kl_mean=divergence,
        top1_agreement=agreement,
        max_abs_logit_error=comparison.largest_error,
        tokens=comparison.tokens,
        tensors_checked=tensors,
        failures=failures(gate, perplexity.increase, agreement, divergence),
    )
