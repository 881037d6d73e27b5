"""Floor 5: how a calibration rounded the weights, read from single numbers and headers without torch."""

from collections.abc import Mapping
from pathlib import Path
from struct import unpack

from trtforge.core.dtypes import FLOAT32_BYTES
from trtforge.core.manifest import read_manifest
from trtforge.formats.calibration import FILE, codes_file, rounded_weights, rounding_warnings
from trtforge.formats.shards import RowReader, StoredTensor, read_header
from trtforge.models.formats import FORMATS
from trtforge.pipeline.record import RoundingRecord


def rounding_of(calibration: Path) -> tuple[RoundingRecord | None, tuple[str, ...]]:
    """The report's record, None for a calibration that does not round weights, and warnings about its samples."""
    manifest = read_manifest(calibration)
    config = manifest.identity.config if manifest is not None else {}
    if manifest is None or config.get("rounding") is None or FORMATS[config["format"]].methods == ("nearest",):
        return None, ()
    if codes_file(0) not in manifest.files:
        return RoundingRecord(method="nearest"), ()
    headers = {tensor.spec.name: tensor for tensor in read_header(calibration / FILE)}
    kinds = ("tokens", "inputs", "output_error", "nearest_error")
    tokens, widths, errors, nearest = (_numbers(headers, kind) for kind in kinds)
    compensated = rounded_weights(calibration, manifest)
    shares = [errors[module] / nearest[module] for module in compensated if nearest.get(module)]
    record = RoundingRecord(
        method="compensated",
        compensated=len(compensated),
        nearest=len(tokens) - len(compensated),
        error_left=sum(shares) / len(shares) if shares else None,
        fewest_tokens=int(min(tokens.values())) if tokens else None,
    )
    return record, tuple(rounding_warnings(tokens, widths))


def _numbers(headers: Mapping[str, StoredTensor], kind: str) -> dict[str, float]:
    """The single numbers `<module>.<kind>` of a calibration, by module."""
    found = {}
    with RowReader() as reader:
        for name, tensor in headers.items():
            if name.endswith(f".{kind}") and tensor.spec.nbytes == FLOAT32_BYTES:
                data = reader.read_bytes(tensor, 0, memoryview(bytearray(FLOAT32_BYTES)))
                found[name.removesuffix(f".{kind}")] = float(unpack("<f", data)[0])
    return found
