"""Failures of requests, and of the models around the engine."""

from trtforge.doctor.pattern import Pattern

PATTERNS = (
    Pattern(
        id="lora-task-unknown",
        title="LoRA weights are not in the cache",
        regex=r"LoRA task (?P<task>\d+) not found in cache",
        means="The request names LoRA task {task} without its weights, and the cache does not hold them: it is the "
        "first request of that task, or the weights were evicted.",
        do="Send the weights with the first request of task {task} (warm the cache at start), and enlarge the LoRA "
        "cache if tasks are evicted.",
        sources=("TensorRT-LLM issue #1552",),
    ),
    Pattern(
        id="lora-cache-full",
        title="LoRA cache is too small",
        regex=r"Error storing task=(?P<task>\d+) in PEFT cache",
        means="The adapter of task {task} does not fit into the LoRA cache.",
        do="Raise lora_cache_host_memory_bytes and lora_cache_gpu_memory_fraction of the tensorrt_llm model.",
        sources=("tensorrtllm_backend issue #559",),
    ),
    Pattern(
        id="prompt-too-long",
        title="prompt longer than the engine takes",
        regex=r"Prompt length \((?P<prompt>\d+)\) exceeds maximum (?P<limit>input|sequence) length \((?P<built>\d+)\)",
        means="A prompt has {prompt} tokens; the engine's longest {limit} is {built}. Without chunked context the "
        "longest prompt is the smaller of max_seq_len - 1 and max_num_tokens.",
        do="Build with max_input_len and max_seq_len above {prompt}, and chunked context if max_num_tokens is the "
        "limit; `trtforge compile --dry-run` prints the longest prompt.",
        sources=("tensorrtllm_backend issue #141", "tensorrtllm_backend issue #565"),
    ),
    Pattern(
        id="kv-cache-below-one-sequence",
        title="KV cache smaller than one sequence",
        regex=r"maxTokensInPagedKvCache must be large enough",
        means="The KV cache does not hold even one request of the longest length.",
        do="Give it more memory (kv_cache_fraction, kv_cache_tokens, a smaller engine), or build with a smaller "
        "max_seq_len.",
        sources=("TensorRT-LLM issue #542",),
    ),
    Pattern(
        id="kv-cache-manager-defect",
        title="defect of an old KV cache manager",
        regex=r"mNextBlocks\.empty\(\)",
        means="An assertion of the KV cache block manager failed: a defect of early TensorRT-LLM releases.",
        do="Use a newer TensorRT-LLM release, or disable KV cache block reuse until then.",
        sources=("TensorRT-LLM issue #699",),
    ),
    Pattern(
        id="outside-profile",
        title="request outside the engine's limits",
        regex=r"does not satisfy any optimization profile",
        means="A request's batch or length lies outside the range that the engine was built for.",
        do="Send within max_batch_size, max_input_len and max_num_tokens of the build, or build with larger ones.",
        sources=("TensorRT-LLM issue #176",),
    ),
    Pattern(
        id="outside-profile-range",
        title="request outside the engine's limits",
        regex=r"(?:Couldn't assign (?P<tensor>\w+) with shape (?P<shape>.{1,200}?), )?engine supports \[min, opt, max\]"
        r"(?: = (?P<range>\[.{0,400}\]))?",
        means="A request has {tensor} of shape {shape}; the engine was built for {range} (min, opt, max).",
        do="Send within max_batch_size, max_input_len and max_num_tokens of the build, or build with larger ones.",
        sources=("TensorRT-LLM issue #176",),
    ),
    Pattern(
        id="shared-memory",
        title="/dev/shm is too small",
        regex=r"Unable to initialize shared memory key '(?P<key>[^']*)' to requested size(?: \((?P<size>\d+) bytes\))?",
        means="/dev/shm has no room for {size} more bytes: every instance of a Python model takes 64 MiB, and a "
        "container has 64 MiB by default.",
        do="Start the container with --shm-size=2g (Kubernetes: an emptyDir of medium Memory at /dev/shm). `trtforge "
        "doctor` shows what is free.",
        sources=("Triton server issue #6195",),
    ),
    Pattern(
        id="streaming-not-decoupled",
        title="streaming from a model that is not decoupled",
        regex=r"Streaming is only supported if model is deployed using decoupled mode",
        means="A request asks for streaming; the model's config.pbtxt says decoupled: false.",
        do="Set decoupled to true in every model of the repository, as `serving.streaming: true` of the recipe does.",
        sources=("tensorrtllm_backend issue #626",),
    ),
    Pattern(
        id="decoupled-without-stream",
        title="plain call of a decoupled model",
        regex=r"doesn't support models with decoupled transaction policy",
        means="The model streams (decoupled: true), and the client called it without a stream.",
        do="Use /generate_stream or gRPC ModelStreamInfer (`trtforge infer` does), or package with "
        "`serving.streaming: false`.",
        sources=("tensorrtllm_backend issue #177", "TensorRT-LLM issue #677"),
    ),
    Pattern(
        id="decoupled-returned",
        title="Python model without support for streaming",
        regex=r"is using the decoupled mode and the execute function must return None",
        means="config.pbtxt says decoupled: true, and the model.py beside it returns responses instead of sending "
        "them: the two are of different releases or settings.",
        do="Take model.py and config.pbtxt of one release, with the same decoupled setting in all models.",
        sources=("tensorrtllm_backend issue #488",),
    ),
    Pattern(
        id="lists-posted-to-engine",
        title="JSON sent to the engine model",
        regex=r"Shape does not match true shape of 'data' field",
        means="The request was posted to the tensorrt_llm model, whose tensors have a batch dimension that /generate "
        "cannot express.",
        do="Post text to `ensemble` or `tensorrt_llm_bls`, as `trtforge infer` does.",
        sources=("tensorrtllm_backend issue #502",),
    ),
    Pattern(
        id="batched-request",
        title="several prompts in one request",
        regex=r"Expected batch dimension to be 1",
        means="With in-flight batching a request has one prompt, and the server batches; this request has more.",
        do="Send one request for each prompt.",
        sources=("tensorrtllm_backend issue #319", "tensorrtllm_backend issue #228"),
    ),
    Pattern(
        id="batch-sizes-differ",
        title="inputs of different batch sizes",
        regex=r"(?:input '(?P<input>[^']+)' )?batch size does not match other inputs",
        means="The inputs of one request do not have the same batch size (input {input}).",
        do="Send one prompt a request, and every input with batch dimension 1.",
        sources=("tensorrtllm_backend issue #319", "tensorrtllm_backend issue #228"),
    ),
    Pattern(
        id="client-data-type",
        title="client and repository of different releases",
        regex=r"(?:'(?P<input>\w+)' )?data-type is '(?P<sent>\w+)', but model (?:'[^']*' )?expects '(?P<wanted>\w+)'",
        means="Input {input} was sent as {sent}; the model takes {wanted}. Data types of inputs changed between "
        "releases.",
        do="Use client and templates of one release; `trtforge package` writes the data types of the engine's release.",
        sources=("tensorrtllm_backend issue #358",),
    ),
    Pattern(
        id="port-in-use",
        title="port is in use",
        regex=r"Socket '(?P<host>.{0,200}?):(?P<port>\d+)' already in use",
        means="Another process listens on port {port} of {host}, often a server that was not stopped.",
        do="Stop it (`trtforge doctor` names its process) or choose another port.",
        sources=("tensorrtllm_backend issue #243",),
    ),
    Pattern(
        id="guided-decoding-off",
        title="guided decoding is not set up",
        regex=r"GuidedDecoder is not setup",
        means="A request asks for guided decoding (JSON, grammar); the engine model was loaded without it.",
        do="Set guided_decoding_backend and xgrammar_tokenizer_info_path in tensorrt_llm/config.pbtxt.",
        sources=("TensorRT-LLM issue #2624",),
    ),
    Pattern(
        id="python-stub",
        title="a Python model crashed",
        regex=r"Stub process '(?P<model>[^']*)' is not healthy",
        means="The process of the Python model {model} ended. The reason is in the error above this line.",
        do="Read the first error above this line; if there is none, the process was killed: check memory and /dev/shm.",
        sources=("tensorrtllm_backend issue #159",),
        kind="effect",
    ),
    Pattern(
        id="triton-without-gpu",
        title="Triton found no GPU",
        regex=r"CudaDriverHelper has not been initialized|Failed to initialize NVML",
        means="Triton found no GPU. It can still serve CPU models.",
        do="Nothing on a machine without a GPU.",
        sources=("Triton server source, server.cc",),
        kind="harmless",
    ),
)
