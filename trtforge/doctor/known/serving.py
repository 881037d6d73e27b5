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
        regex=r"maxTokensInPagedKvCache(?: \(\d+\))? must be large enough",
        means="The KV cache does not hold even one request of the longest length.",
        do="Give it more memory (kv_cache_fraction, kv_cache_tokens, a smaller engine), or build with a smaller "
        "max_seq_len.",
        sources=("TensorRT-LLM issue #542", "cortex.cpp issue #981"),
    ),
    Pattern(
        id="kv-cache-full",
        title="KV cache is full",
        regex=r"Can't allocate new blocks\b.{0,60}No free blocks left",
        means="The running requests need more blocks of the KV cache than there are.",
        do="Give the KV cache more memory (kv_cache_free_gpu_mem_fraction), take the scheduler policy "
        "guaranteed_no_evict, or lower max_batch_size.",
        sources=("TensorRT-LLM documentation, memory usage", "TensorRT-LLM source, kvCacheManager.cpp"),
    ),
    Pattern(
        id="cuda-allocation",
        title="out of GPU memory",
        regex=r"CUDA runtime error in .{0,300}: out of memory",
        means="TensorRT-LLM could not allocate GPU memory: buffers grow with the engine's max_batch_size, "
        "max_num_tokens and max_beam_width, and the KV cache takes a fraction of what is then free.",
        do="Build with a smaller max_batch_size and max_num_tokens, lower kv_cache_free_gpu_mem_fraction "
        "(serving.kv_cache_fraction), or use more GPUs; `trtforge doctor` shows other processes' memory.",
        sources=("tensorrtllm_backend issue #281", "tensorrtllm_backend issue #195", "TensorRT-LLM issue #1060"),
    ),
    Pattern(
        id="kv-cache-manager-defect",
        title="defect of an old KV cache manager",
        regex=r"mNextBlocks\.empty\(\)",
        means="An assertion of the KV cache block manager failed: a defect of several TensorRT-LLM releases, last "
        "reported in January 2025.",
        do="Use a newer TensorRT-LLM release, or disable KV cache block reuse until then.",
        sources=("TensorRT-LLM issue #699", "TensorRT-LLM issue #2708"),
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
        regex=r"Expected batch dimension to be 1(?! for each lora request)",
        means="With in-flight batching a request has one prompt, and the server batches; this request has more.",
        do="Send one request for each prompt.",
        sources=("tensorrtllm_backend issue #319", "tensorrtllm_backend issue #228"),
    ),
    Pattern(
        id="batch-not-decoupled",
        title="several prompts in one request",
        regex=r"Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy",
        means="A request has several prompts; the engine model takes them only if it is decoupled.",
        do="Send one request for each prompt, or set decoupled to true in every model of the repository.",
        sources=("TensorRT-LLM source, triton_backend/inflight_batcher_llm/src/utils.cc",),
    ),
    Pattern(
        id="batch-above-limit",
        title="request larger than max_batch_size",
        regex=r"inference request batch-size must be <= (?P<limit>\d+) for '(?P<model>[^']{1,200})'",
        means="A request has more rows than max_batch_size {limit} of {model}'s config.pbtxt.",
        do="Send one prompt a request; Triton batches them. If max_batch_size is smaller than the engine's, give all "
        "models of the repository the engine's.",
        sources=("Triton core source, infer_request.cc",),
    ),
    Pattern(
        id="input-shape",
        title="input of another shape",
        regex=r"unexpected shape for input '(?P<input>[^']{1,200})' for model '(?P<model>[^']{1,200})'\. "
        r"Expected (?P<wanted>\[[^\]]{0,100}\]), got (?P<sent>\[[^\]]{0,100}\])",
        means="Input {input} of {model} has shape {wanted}; {sent} was sent. With max_batch_size above 0 the first "
        "dimension is the batch.",
        do="Send shape [1, n] instead of [n]; `trtforge infer` and tritonclient's examples do.",
        sources=("Triton core source, infer_request.cc",),
    ),
    Pattern(
        id="inputs-missing",
        title="request without required inputs",
        regex=r"expected (?P<wanted>\d+) inputs but got (?P<sent>\d+) inputs for model '(?P<model>[^']{1,200})'",
        means="{model} takes {wanted} inputs and got {sent}. If it is postprocessing or tensorrt_llm, the models of "
        "the repository are of different releases, or the caller left an input out that this release requires.",
        do="Take all models of the repository from one release (`trtforge package` writes them together), and send "
        "what config.pbtxt does not call optional; early releases also need bad_words and stop_words.",
        sources=(
            "tensorrtllm_backend issue #227",
            "tensorrtllm_backend issue #188",
            "Triton core source, infer_request.cc",
        ),
    ),
    Pattern(
        id="input-unknown",
        title="request with an unknown input",
        regex=r"unexpected inference input '(?P<input>[^']{1,200})'(?: for model '(?P<model>[^']{1,200})')?",
        means="The model has no input {input}: the client is of another release than the repository.",
        do="Leave it out, or use client and templates of one release.",
        sources=("Triton core source, model.cc",),
    ),
    Pattern(
        id="beam-width-differs",
        title="beam width that the engine does not take",
        regex=r"Request with beam width (?P<asked>\d+) differs from the max beam width (?P<built>\d+)"
        r"|Request beam width (?P<sent>\d+) is not equal to max_beam_width (?P<limit>\d+)",
        means="The request's beam width is not max_beam_width. Early TensorRT-LLM releases, and the PyTorch backend, "
        "take only that width.",
        do="Send beam_width equal to max_beam_width, or serve plain sampling with max_beam_width 1.",
        sources=("tensorrtllm_backend issue #154", "TensorRT-LLM issue #1282", "TensorRT-LLM issue #7368"),
    ),
    Pattern(
        id="beam-width-above",
        title="beam width above the engine's",
        regex=r"Requested beam width (?P<asked>\d+) is larger than configured max beam width (?P<built>\d+)"
        r"|samplingConfig\.beamWidth <= maxBeamWidth",
        means="A request's beam width is above the one that the engine was built for, or above max_beam_width of "
        "config.pbtxt, which is 1 by default.",
        do="Build with max_beam_width, and set max_beam_width of tensorrt_llm/config.pbtxt to the same value.",
        sources=("tensorrtllm_backend issue #115", "TensorRT-LLM source, trtGptModelInflightBatching.cpp"),
    ),
    Pattern(
        id="queue-full",
        title="server is busy",
        regex=r"Exceeds maximum queue size|Maximum queue size of (?P<limit>\d+) has been reached",
        means="More requests wait than max_queue_size allows, so this one was refused.",
        do="Send it again later, or raise max_queue_size (serving.max_queue_size). If it happens all the time, the "
        "server has too little throughput: `trtforge advise` says why.",
        sources=("Triton core source, scheduler_utils.cc", "TensorRT-LLM source, executorImpl.cpp"),
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
        regex=r"(?:Socket|resolved for) '(?P<host>.{0,200}?):(?P<port>\d+)'"
        r"(?: already in use|.{0,400}Address already in use)",
        means="Another process listens on port {port} of {host}, often a server that was not stopped.",
        do="Stop it (`trtforge doctor` names its process) or choose another port.",
        sources=("tensorrtllm_backend issue #243", "tensorrtllm_backend issue #524"),
    ),
    Pattern(
        id="port-in-use-openai",
        title="port is in use",
        regex=r"(?:attempting to bind on address \('[^']{0,200}', |Failed to bind socket to \S{0,200}:)(?P<port>\d+)"
        r".{0,100}[Aa]ddress already in use",
        means="Another process listens on port {port}: a server that was not stopped, or the same server, started by "
        "every rank.",
        do="Stop it (`trtforge doctor` names its process) or choose another port. Of several ranks only the first may "
        "serve: start trtllm-serve once, or through trtllm-llmapi-launch.",
        sources=("TensorRT-LLM issue #784", "TensorRT-LLM source, commands/serve.py"),
    ),
    Pattern(
        id="guided-decoding-off",
        title="guided decoding is not set up",
        regex=r"GuidedDecoder is not setup",
        means="A request asks for guided decoding (JSON, grammar); the engine model was loaded without it.",
        do="Set guided_decoding_backend and xgrammar_tokenizer_info_path in tensorrt_llm/config.pbtxt; for the LLM API "
        "guided_decoding_backend: xgrammar in its options.",
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
