"""The LLM API and its PyTorch backend."""

from trtforge.doctor.pattern import Pattern

PATTERNS = (
    Pattern(
        id="pytorch-architecture",
        title="architecture that the PyTorch backend does not have",
        regex=r"Unknown architecture for AutoModelForCausalLM: (?P<model>[\w.-]+)",
        means="The PyTorch backend of this TensorRT-LLM release has no {model}.",
        do="Use a newer release, or build an engine if docs/formats.md lists the architecture; a model of one's own "
        "can be registered with register_auto_model.",
        sources=("TensorRT-LLM source, _torch/models/modeling_auto.py",),
    ),
    Pattern(
        id="executor-memory",
        title="GPU memory too small for the model",
        regex=r"Executor creation failed due to insufficient GPU memory",
        means="The PyTorch backend ran out of GPU memory while it started. The lines below this one name the component "
        "that did not fit and what each took before it.",
        do="Model: more GPUs (tp, pp) or a quantised checkpoint. KV cache: a smaller free_gpu_memory_fraction. "
        "Anything else: a smaller max_num_tokens, max_batch_size or max_seq_len.",
        sources=("TensorRT-LLM issue #5950", "TensorRT-LLM issue #5872", "TensorRT-LLM source, py_executor_creator.py"),
    ),
    Pattern(
        id="kv-cache-no-sequence",
        title="no GPU memory left for the KV cache",
        regex=r"Impossible to fit in any sequence in kvCache",
        means="After the weights and the buffers, the GPU memory left does not hold one block of the KV cache.",
        do="Use more GPUs (tp, pp) or a quantised checkpoint, a larger free_gpu_memory_fraction, or a smaller "
        "max_num_tokens and max_beam_width.",
        sources=("TensorRT-LLM source, _torch/pyexecutor/resource_manager.py",),
    ),
    Pattern(
        id="prompt-above-max-num-tokens",
        title="prompt longer than max_num_tokens",
        regex=r"The sum of prompt length \((?P<prompt>[\d.]+)\), query length \((?P<query>[\d.]+)\) should not exceed "
        r"max_num_tokens \((?P<limit>\d+)\)",
        means="A prompt has {prompt} tokens; without chunked prefill the PyTorch backend computes at most "
        "max_num_tokens {limit} in a step.",
        do="Set enable_chunked_prefill, or max_num_tokens to the longest prompt (default 8192).",
        sources=("TensorRT-LLM issue #9277", "TensorRT-LLM source, llmapi/llm.py"),
    ),
    Pattern(
        id="prompt-above-max-seq-len",
        title="prompt longer than max_seq_len",
        regex=r"prompt length (?P<prompt>\d+) plus query length \d+ is larger than max_seq_len (?P<limit>\d+)"
        r"|`default_max_tokens` \(-?\d+\) (?:must|should) be greater than 0",
        means="The prompt leaves no room for an answer: prompt and answer together may have max_seq_len tokens.",
        do="Shorten the prompt, or start with a larger max_seq_len if the model's positions and the KV cache allow it.",
        sources=("TensorRT-LLM pull request #7239", "TensorRT-LLM source, executor/base_worker.py"),
    ),
    Pattern(
        id="executor-worker",
        title="a worker of the LLM API ended",
        regex=r"Executor worker returned error",
        means="A rank of the LLM API could not start; this line only reports it.",
        do="Read the first error above this line: `Failed to initialize executor on rank` names the cause.",
        sources=("TensorRT-LLM issue #7706", "TensorRT-LLM source, executor/proxy.py"),
        kind="effect",
    ),
)
