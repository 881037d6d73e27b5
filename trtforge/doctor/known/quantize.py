"""Calibrating and quantising with ModelOpt, and the possible shapes of quantised weights."""

from trtforge.doctor.pattern import Pattern

_PER_RANK = (
    "Use less tensor and more pipeline parallelism (tp 4, pp 2 instead of tp 8), or group size 64. `trtforge build "
    "--dry-run` names the choices that fit."
)
_NO_OFFLOAD = (
    "Stop: use more or larger GPUs so that the whole model fits, or `trtforge calibrate`, which holds one layer at a "
    "time."
)

PATTERNS = (
    Pattern(
        id="calibration-out-of-memory",
        title="GPU memory too small to quantise",
        regex=r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)",
        inside=r"[/\\.](?:modelopt|ammo)[/\\.]|quantize\.py",
        means="ModelOpt ran out of GPU memory ({size} more were needed): it holds the original weights and the "
        "quantised ones, about 1.5 times the model, plus activations. The finished engine needs far less.",
        do="Quantise on more GPUs than you serve on, or with a smaller --calib_size and --batch_size; `trtforge "
        "calibrate` holds one layer at a time.",
        sources=("TensorRT-LLM issue #1331",),
    ),
    Pattern(
        id="gpu-out-of-memory",
        title="out of GPU memory",
        regex=r"CUDA out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)",
        means="The GPU had less than {size} free.",
        do="Look for other processes on the GPU (`trtforge doctor` shows the used memory); use a smaller batch, a "
        "smaller KV cache or more GPUs.",
        sources=("TensorRT-LLM issue #1331",),
    ),
    Pattern(
        id="cuda-out-of-memory",
        title="out of GPU memory",
        regex=r"CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)|Triton Error \[CUDA\]: out of memory",
        means="The driver, cuBLAS or a kernel of OpenAI's Triton could not get GPU memory: the GPU is full, mostly "
        "because of other processes or a large KV cache.",
        do="Look for other processes on the GPU (`trtforge doctor` shows the used memory); use a smaller batch, a "
        "smaller KV cache or more GPUs.",
        sources=("CUDA documentation, cudaErrorMemoryAllocation", "Qwen3 issue #873"),
    ),
    Pattern(
        id="offloaded-to-cpu",
        title="model offloaded to the CPU",
        regex=r"Some parameters are on the meta device",
        means="The model did not fit into GPU memory, and accelerate offloaded layers to the CPU or the disk without "
        "an error. Calibration then takes hours, and the export after it fails.",
        do=_NO_OFFLOAD,
        sources=("TensorRT-LLM issue #2091",),
    ),
    Pattern(
        id="meta-tensor",
        title="model offloaded to the CPU",
        regex=r"Cannot copy out of meta tensor",
        means="The model did not fit into GPU memory: accelerate had offloaded weights, which cannot be read here.",
        do=_NO_OFFLOAD,
        sources=("TensorRT-LLM issue #2091",),
    ),
    Pattern(
        id="awq-group",
        title="weights do not divide into AWQ groups",
        regex=r"Weight shape is not divisible for block size",
        means="A rank's part of a weight is not a multiple of the AWQ group: (intermediate_size / tp) must be "
        "divisible by the group size, 128 or 64.",
        do=_PER_RANK,
        sources=("Model-Optimizer issue #23",),
    ),
    Pattern(
        id="int4-alignment",
        title="weights of a rank are not a multiple of 32 bytes",
        regex=r"Number of bytes for rows and cols must be a multiple of 32"
        r".{0,300}?num_rows_bytes = (?P<rows>\d+).{0,100}?num_col_bytes = (?P<columns>\d+)",
        means="A quantised weight of one rank has rows of {rows} and columns of {columns} bytes; the kernel needs "
        "multiples of 32. It is often lm_head, with vocab_size / tp / 2 bytes.",
        do="Use a smaller tp with pp instead, or leave lm_head unquantised (trtforge does).",
        sources=("TensorRT-LLM issue #843",),
    ),
    Pattern(
        id="gptq-group",
        title="weights do not divide into GPTQ groups",
        regex=r"Current weight shape is invalid for mapping\.tp_size(?:=(?P<tp>\d+))?",
        means="With tp {tp} a rank's part of a weight is not a multiple of the GPTQ group.",
        do=_PER_RANK,
        sources=("TensorRT-LLM issue #648",),
    ),
    Pattern(
        id="export-failed",
        title="ModelOpt could not export",
        regex=r"Cannot export model to the model_config",
        means="ModelOpt quantised the model but could not write the checkpoint. The reason is in the line `Detailed "
        "export error:`.",
        do="Read the detailed export error. The calibrated state was saved, so calibration need not run again.",
        sources=("Model-Optimizer issue #23",),
        kind="effect",
    ),
    Pattern(
        id="export-error",
        title="ModelOpt could not export",
        regex=r"Detailed export error: (?P<error>.{0,400}\S)",
        means="ModelOpt quantised the model but could not write the checkpoint: {error}",
        do="Follow that message; if it names the model's type, ModelOpt does not support the architecture, but a newer "
        "release may. The calibrated state was saved.",
        sources=("Model-Optimizer issue #23",),
    ),
    Pattern(
        id="large-kv-activation",
        title="FP8 KV cache is risky for this model",
        regex=r"Large KV activation detected: (?P<amax>[\d.]*\d)",
        means="Keys or values have an amax of {amax}: a single scaling factor for the KV cache then loses accuracy (as "
        "with Qwen2.5).",
        do="Keep the KV cache in the model's dtype (quantization.kv_cache: none), or let the quality gate decide.",
        sources=("TensorRT-LLM issue #4218",),
        kind="warning",
    ),
)
