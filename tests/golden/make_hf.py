#!/usr/bin/env python3
"""Write the small Hugging Face checkpoints that the golden data was made from.

    make_hf.py OUT_DIR [CASE ...]

Every value comes from a formula, not from a random generator whose stream a library version could change: the
bytes of a tensor depend on the case's weight seed, the tensor's name and the position alone. Needs numpy.
`cases.json` holds, for each case, the Hugging Face `config.json` and the list of tensors (name, dtype, shape).
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np


def tensor_bytes(seed: str, name: str, dtype: str, shape: list[int]) -> bytes:
    """Little-endian bytes of one tensor: uniform values, norms around 1, biases and matrices around 0."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # [0, 1), 24 bits
    if len(shape) == 1 and name.endswith("weight"):
        value = np.float32(0.8) + np.float32(0.4) * unit  # normalisation weights
    else:
        value = (unit - np.float32(0.5)) * np.float32(0.2 if len(shape) == 1 else 0.16)
    if dtype == "F32":
        return value.tobytes()
    if dtype == "F16":
        return value.astype(np.float16).tobytes()
    if dtype == "BF16":  # round to nearest even
        bits = value.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    raise ValueError(f"{name}: no formula for dtype {dtype}")


def write_safetensors(path: Path, seed: str, tensors: list[list]) -> None:
    header, offset, blobs = {"__metadata__": {"format": "pt"}}, 0, []
    for name, dtype, shape in tensors:
        blob = tensor_bytes(seed, name, dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))


def write_case(name: str, folder: Path) -> Path:
    """Write the checkpoint of one case into `folder`."""
    case = json.loads((Path(__file__).parent / "cases.json").read_text())[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"], indent=2) + "\n")
    write_safetensors(folder / "model.safetensors", case["seed"], case["tensors"])
    return folder


def main() -> None:
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    for name in wanted or json.loads((Path(__file__).parent / "cases.json").read_text()):
        print(write_case(name, out / name))


if __name__ == "__main__":
    main()
