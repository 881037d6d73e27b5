"""Building engines: memory, options, tensors, and limits of the release."""

from trtforge.doctor.pattern import Pattern

_LESS = "Lower max_batch_size, max_num_tokens, max_seq_len or max_beam_width, or use more GPUs (tp, pp)."
_OTHER_RECIPE = (
    "Convert again, completely, with the converter of this model and this release; for other quantised formats, from "
    "the original checkpoint."
)

PATTERNS = (
    Pattern(
        id="build-out-of-memory",
        title="GPU memory too small for the build",
        regex=r"resizePhysical.{0,300}OutOfMemory",
        means="TensorRT could not get GPU memory while it built the engine: it allocates for the largest batch and "
        "length of the build.",
        do=_LESS + " Close other processes on the GPU.",
        sources=("TensorRT-LLM issue #346",),
    ),
    Pattern(
        id="build-scratch-space",
        title="GPU memory too small for the build",
        regex=r"requires (?P<needed>\d+) bytes of scratch space, but only (?P<free>\d+)",
        means="One layer of the engine needs {needed} bytes of scratch space for the largest batch and length of the "
        "build; {free} are free.",
        do=_LESS,
        sources=("TensorRT-LLM issue #352",),
    ),
    Pattern(
        id="tensorrt-allocation",
        title="out of GPU memory",
        regex=r"Error Code \d+: (?:Cuda Runtime \(out of memory\)|OutOfMemory\b)",
        means="TensorRT could not get GPU memory while it built or loaded the engine. When an engine is loaded, its "
        "weights and the workspace of the largest batch must fit.",
        do=_LESS + " Close other processes on the GPU.",
        sources=("TensorRT-LLM issue #346", "llgtrt issue #7"),
    ),
    Pattern(
        id="build-tactic-memory",
        title="GPU memory short for a kernel",
        regex=r"Tactic Device request(?:: (?P<needed>\d+ ?MB) Available: (?P<free>\d+ ?MB))?",
        means="A kernel that TensorRT wanted to time needs {needed} of GPU memory, but {free} are free. As long as the "
        "build continues, it uses slower kernels instead.",
        do=_LESS,
        sources=("TensorRT-LLM issue #85",),
    ),
    Pattern(
        id="build-tactic-skipped",
        title="kernels skipped for lack of memory",
        regex=r"Skipping tactic .{0,300}insufficient memory",
        means="TensorRT skipped kernels that did not fit into GPU memory. The engine works but may be slower.",
        do="Free the GPU's memory for the build, or lower the build's limits.",
        sources=("TensorRT-LLM issue #102",),
        kind="warning",
    ),
    Pattern(
        id="build-no-format",
        title="no kernel for a layer",
        regex=r"could not find any supported formats consistent with input/output data types",
        means="TensorRT found no kernel for a layer: too little memory for any, or a plugin whose data type is not the "
        "model's.",
        do="Set the plugins (gemm, gpt_attention) to the model's dtype or to auto, and lower the build's limits.",
        sources=("TensorRT-LLM documentation, troubleshooting",),
    ),
    Pattern(
        id="build-no-implementation",
        title="no kernel for a layer",
        regex=r"Could not find any implementation for node (?P<node>\S{1,300})",
        means="TensorRT found no kernel for a part of the network: none fits into the free GPU memory, or this "
        "TensorRT does not support that combination of layers and dtypes on this GPU.",
        do="Look for `Skipping tactic` above: with `insufficient memory`, lower the build's limits; otherwise build in "
        "the release's own image and leave the plugins at their defaults.",
        sources=("TensorRT documentation, error messages", "TensorRT-LLM issue #54", "TensorRT-LLM issue #1478"),
    ),
    Pattern(
        id="timing-cache",
        title="timing cache of another machine",
        regex=r"Invalid timing cache, using freshly created one",
        means="The timing cache is of another TensorRT version or GPU, or does not exist; TensorRT creates a new one.",
        do="Nothing: this is not the cause. If the process ended right after it, look for `Killed`.",
        sources=("TensorRT-LLM issue #489",),
        kind="harmless",
    ),
    Pattern(
        id="killed",
        title="killed for lack of host memory",
        regex=r"^\s*Killed\s*$|\bOOMKilled\b|exited on signal 9 \(Killed\)|: line \d+: +\d+ Killed\b"
        r"|(?i:\b(?:exit(?:ed)?(?: with)? ?(?:code|status)|returncode|rc)\b)\D{0,4}\b137\b",
        means="The kernel killed the process (signal 9, status 137): the machine or its container ran out of host "
        "memory, not of GPU memory.",
        do="Give it more memory, or run fewer ranks at once (--workers 1). `trtforge doctor` shows the container's "
        "limit; `dmesg` names the process.",
        sources=("TensorRT-LLM issue #102",),
    ),
    Pattern(
        id="build-option-unknown",
        title="option that this release does not have",
        regex=r"trtllm-build: error: unrecognized arguments: (?P<arguments>.{0,400}\S)",
        means="This release's trtllm-build does not know {arguments}: options differ between releases. "
        "--max_output_len is gone (--max_seq_len is input plus output, not its new name), --paged_kv_cache became "
        "--kv_cache_type, --use_custom_all_reduce and --multi_block_mode are gone.",
        do="Take the command that `trtforge compile --dry-run --target-version X` prints for the release.",
        sources=("TensorRT-LLM issue #2057", "TensorRT-LLM issue #2008"),
    ),
    Pattern(
        id="checkpoint-not-converted",
        title="Hugging Face checkpoint given to trtllm-build",
        regex=r"^KeyError: 'architecture'$",
        inside=r"modeling_utils\.py|MODEL_MAP",
        means="config.json has no `architecture`: it is a Hugging Face checkpoint (`architectures`), not one that was "
        "converted for TensorRT-LLM.",
        do="Convert it first (`trtforge convert`, or convert_checkpoint.py of the model), and build the output.",
        sources=("TensorRT-LLM issue #6360",),
    ),
    Pattern(
        id="trtllm-build-gone",
        title="TensorRT-LLM without engines",
        regex=r"trtllm-build: (?:command )?not found",
        means="There is no trtllm-build here: TensorRT-LLM is not installed, or it is newer than 1.3.0rc20, the last "
        "release with TensorRT engines.",
        do="Work in the image of a 1.2 release (`trtforge compile --dry-run` names it), or serve the Hugging Face "
        "checkpoint with the LLM API.",
        sources=("TensorRT-LLM documentation, TensorRT backend removal",),
    ),
    Pattern(
        id="tensorrt-backend-gone",
        title="TensorRT-LLM without engines",
        regex=r"ValueError: (?i:(?=.{0,400}\bbackend\b)(?=.{0,400}\btensorrt\b(?!-LLM)))",
        means="This TensorRT-LLM no longer has a TensorRT backend: 1.3.0rc20 was the last release with it.",
        do="Install a 1.2 release for engines, or leave the backend out and serve with the PyTorch backend.",
        sources=("TensorRT-LLM documentation, TensorRT backend removal",),
    ),
    Pattern(
        id="tensors-missing",
        title="checkpoint lacks tensors",
        regex=r"Required but not provided tensors:\W*(?P<first>[\w.]+)?",
        means="The checkpoint lacks tensors that the model needs, {first} among them. If scales are missing, "
        "the checkpoint is not quantised as its config.json says.",
        do=_OTHER_RECIPE,
        sources=("TensorRT-LLM issue #1677",),
    ),
    Pattern(
        id="tensor-names-differ",
        title="checkpoint of another model",
        regex=r"Provided tensor names are different",
        means="The checkpoint's tensors have other names than the model expects: it is of another architecture, "
        "release or quantisation.",
        do=_OTHER_RECIPE,
        sources=("TensorRT-LLM issue #1109",),
    ),
    Pattern(
        id="tensor-shape-differs",
        title="tensor of another shape",
        regex=r"The value updated is not the same shape as the original\. "
        r"Updated: \((?P<stored>[\d, ]+)\), original: \((?P<expected>[\d, ]+)\)",
        means="A tensor of the checkpoint has shape ({stored}), but config.json implies ({expected}). If the first "
        "dimension differs, it is often vocab_size: tokens were added without a change of config.json.",
        do="Set vocab_size in config.json to the number of rows of the embedding and convert again.",
        sources=("TensorRT-LLM issue #561",),
    ),
)
