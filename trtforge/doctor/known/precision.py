"""Number formats and features that the GPU, the release or the engine does not support."""

from trtforge.doctor.pattern import Pattern

PATTERNS = (
    Pattern(
        id="fp8-hardware",
        title="GPU without FP8",
        regex=r"Networks with FP8 (?:precision|Q/DQ layers) require hardware with FP8 support",
        means="The engine uses FP8, which needs compute capability 8.9 or later (Ada, Hopper, Blackwell); the GPU of "
        "this build has less.",
        do="Quantise to INT4-AWQ or INT8 instead, or build on an L4, L40S, H100 or later. `trtforge doctor RECIPE` "
        "checks this before the build.",
        sources=("TensorRT-LLM issue #1428", "Model-Optimizer issue #70"),
    ),
    Pattern(
        id="fp8-attention",
        title="FP8 attention is not available",
        regex=r"FP8 FMHA (?:cannot|can only) be enabled",
        means="FP8 attention in the context phase was requested, but this GPU or these settings do not support it.",
        do="Build with use_fp8_context_fmha disabled; FP8 weights stay as they are.",
        sources=("TensorRT-LLM issue #1864", "TensorRT-LLM issue #2855"),
    ),
    Pattern(
        id="fp8-block-scales",
        title="GPU without block-scaled FP8",
        regex=r"Unsupported SM version for FP8 block scaling GEMM",
        means="The checkpoint has FP8 weights with block scales (as DeepSeek-V3 has); this release has no GEMM for "
        "them on this GPU. Hopper came first; Ada and Blackwell followed in later releases.",
        do="Use per-tensor FP8 or INT4-AWQ, quantised from the original weights, a newer release, or a Hopper GPU.",
        sources=("TensorRT-LLM issue #4599", "TensorRT-LLM source, fp8BlockScalingGemm.cpp"),
    ),
    Pattern(
        id="fp4-moe",
        title="FP4 experts not on this GPU",
        regex=r"Only SM100 is supported by FP4 block scale MOE",
        means="This kernel for experts in FP4 exists for B200 and GB200 (SM 10.0) only; RTX 50, RTX PRO and DGX Spark "
        "have SM 12.",
        do="Choose another backend for the experts (moe_config: backend: CUTLASS in the LLM API's options), a newer "
        "release, or FP8 weights.",
        sources=("TensorRT-LLM issue #7484", "TensorRT-LLM source, fp4BlockScaleMoe.cpp"),
    ),
    Pattern(
        id="gpu-without-kernels",
        title="GPU without compiled kernels",
        regex=r"no kernel image is available for execution on the device",
        means="A library has no kernels for this GPU's compute capability: the release does not support the GPU, or "
        "was compiled for others.",
        do="Compare nvidia-smi's GPU with the support matrix of the release; use a newer image for a newer GPU, an "
        "older one for Volta, or compile with that architecture (build_wheel.py --cuda_architectures).",
        sources=("TensorRT-LLM issue #484", "TensorRT-LLM issue #159"),
    ),
    Pattern(
        id="ptxas-gpu",
        title="GPU newer than the compiler of Triton kernels",
        regex=r"Value 'sm_(?P<sm>\w{1,8})' is not defined for option 'gpu-name'",
        means="The ptxas that comes with OpenAI's Triton does not know SM {sm}: it is older than the GPU.",
        do="Set TRITON_PTXAS_PATH to the ptxas of a newer CUDA (/usr/local/cuda/bin/ptxas in an image with CUDA 13).",
        sources=("triton-lang issue #8539", "Triton server issue #8632"),
    ),
    Pattern(
        id="memory-pools-unsupported",
        title="GPU without memory pools",
        regex=r"cudaDeviceGetDefaultMemPool.{0,100}operation not supported",
        means="TensorRT-LLM allocates from CUDA's memory pools, which this GPU does not offer: it is a vGPU, a part "
        "of a GPU in a virtual machine.",
        do="Use a machine whose GPU is passed through whole.",
        sources=("tensorrtllm_backend issue #363", "ChatRTX issue #49", "OpenVDB issue #2255"),
    ),
    Pattern(
        id="reuse-without-paged-context",
        title="KV cache reuse needs another build",
        regex=r"model has to be built with paged context FMHA support",
        means="KV cache block reuse is on, and the engine was built without paged context attention.",
        do="Build the engine with use_paged_context_fmha (`--feature kv_reuse` of `trtforge compile`), or set "
        "enable_kv_cache_reuse to false.",
        sources=("TensorRT-LLM executor source", "tensorrtllm_backend issue #271"),
    ),
    Pattern(
        id="draft-tokens",
        title="more draft tokens than the engine takes",
        regex=r"Number of draft tokens \((?P<asked>\d+)\) is larger than maximum number of draft tokens "
        r"\((?P<built>\d+)\)",
        means="A request has {asked} draft tokens; the target engine was built for {built}.",
        do="Build the target engine with max_draft_len {asked} or more, and a speculative decoding mode.",
        sources=("TensorRT-LLM executor source", "tensorrtllm_backend issue #473"),
    ),
    Pattern(
        id="lora-rank",
        title="LoRA rank above the engine's",
        regex=r"Invalid low_rank \((?P<asked>\d+)\)\. low_rank must be smaller than mMaxLowRank \((?P<built>\d+)\)",
        means="The adapter has rank {asked}; the engine was built for ranks up to {built}.",
        do="Build the engine with max_lora_rank {asked} or more.",
        sources=("TensorRT-LLM issue #1903",),
    ),
)
