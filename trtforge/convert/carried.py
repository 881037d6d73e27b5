"""Copies tensors that no rank uses into the checkpoint, so that an LLM API model gets them unchanged.

They are the layers for multi-token prediction and the vision part of a multimodal model.
"""

from collections.abc import Sequence
from pathlib import Path

from trtforge.core.digest import text_digest
from trtforge.core.manifest import FileRecord
from trtforge.core.partial import Finished, Group
from trtforge.core.progress import Progress
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import RowReader, StoredTensor, Writer, header_of
from trtforge.formats.trtllm import CARRIED_FILE
from trtforge.models.family import Facts, Family

_PIECE = 32 << 20


def carried_tensors(checkpoint: HfCheckpoint, family: Family, facts: Facts) -> tuple[StoredTensor, ...]:
    """The tensors to copy, by name."""
    names = sorted(name for name in checkpoint.tensors if family.carries(name, facts.sizes.num_layers))
    return tuple(checkpoint.tensors[name] for name in names)


def write_carried(
    tensors: Sequence[StoredTensor], source: HfCheckpoint, out: Path, progress: Progress
) -> dict[str, FileRecord]:
    """Write the tensors to one file, or keep that of an interrupted run; returns its record, empty without tensors."""
    if not tensors:
        return {}
    names = [tensor.spec.name for tensor in tensors]
    made_from = text_digest("\n".join(f"{name} {source.contents.of_tensor(name).hex()}" for name in names))
    finished = Finished.read(out)
    group = finished.group([CARRIED_FILE])
    if group is None or group.made_from != made_from:
        group = Group(made_from=made_from, files={CARRIED_FILE: _write(tensors, out, progress)})
        finished.add(group)
    return dict(group.files)


def carried_bytes(tensors: Sequence[StoredTensor]) -> int:
    """Size of the file."""
    specs = [tensor.spec for tensor in tensors]
    return len(header_of(specs)) + sum(spec.nbytes for spec in specs) if specs else 0


def _write(tensors: Sequence[StoredTensor], out: Path, progress: Progress) -> FileRecord:
    writer = Writer(out / CARRIED_FILE, [tensor.spec for tensor in tensors])
    try:
        with RowReader() as reader, progress.bar("Copying", carried_bytes(tensors), "B") as bar:
            for tensor in tensors:
                writer.begin(tensor.spec.name)
                for start in range(0, tensor.spec.nbytes, _PIECE):
                    data = memoryview(bytearray(min(_PIECE, tensor.spec.nbytes - start)))
                    writer.write(reader.read_bytes(tensor, start, data))
                    bar.advance(len(data))
        return writer.finish()
    finally:
        writer.close()
