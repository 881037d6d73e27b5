"""The environment of a build: packages, drivers, models from the hub, data sets."""

from trtforge.doctor.pattern import Pattern

_NO_ENGINE = (
    "Serve the Hugging Face checkpoint with TensorRT-LLM's PyTorch backend (llmapi), or use another model; "
    "docs/formats.md lists the architectures with engines."
)

PATTERNS = (
    Pattern(
        id="rope-scaling",
        title="transformers is too old for the model",
        regex=r"rope_scaling. must be a dictionary with two fields",
        means="The model's config.json describes its rotary embedding in a newer form than the installed transformers "
        "reads (Llama 3.1 needs 4.43 or later).",
        do="Use an image or environment with a newer transformers.",
        sources=("NeMo Speech issue #10013",),
    ),
    Pattern(
        id="qwen-type",
        title="architecture without engines",
        regex=r"Unsupported Qwen type: (?P<model>[\w.-]+)",
        means="This TensorRT-LLM release builds no engine for {model}.",
        do=_NO_ENGINE,
        sources=("TensorRT-LLM issue #5450",),
    ),
    Pattern(
        id="architecture-key",
        title="architecture without engines",
        regex=r"KeyError: '(?P<model>gemma3\w*|\w+ForCausalLM|\w+ForConditionalGeneration)'",
        means="This release does not know {model}: its engine builder or its transformers is older than the model.",
        do=_NO_ENGINE,
        sources=("TensorRT-LLM issue #4825",),
    ),
    Pattern(
        id="architecture-unknown",
        title="architecture without engines",
        regex=r"Unknown architecture(?: for [\w.]+)?(?:: (?P<model>[\w.-]+))?",
        means="The architecture of this model ({model}) is not known to this release's engine builder.",
        do=_NO_ENGINE,
        sources=("TensorRT-LLM issue #5450", "TensorRT-LLM issue #4825"),
    ),
    Pattern(
        id="tokenizer-class",
        title="tokenizer cannot be loaded",
        regex=r"Tokenizer class (?P<class>\w+) does not exist",
        means="The server's transformers has no {class}: the tokenizer needs a newer transformers, or is the "
        "model's own code, which was not allowed to run.",
        do="Package tokenizer.json with the repository (`trtforge package` does), or use an image with a newer "
        "transformers.",
        sources=("tensorrtllm_backend issue #62",),
    ),
    Pattern(
        id="tokenizer-backend",
        title="tokenizer cannot be loaded",
        regex=r"Couldn't instantiate the backend tokenizer",
        means="transformers found no tokenizer.json and lacks the packages to create one (sentencepiece, "
        "tiktoken), or the directory is not mounted in the container.",
        do="Put tokenizer.json beside the model, or install sentencepiece in the server's environment.",
        sources=("triton_cli issue #55",),
    ),
    Pattern(
        id="dataset-config",
        title="calibration data not found",
        regex=r"Config name is missing",
        means="The calibration data set has several configurations and none was named; ModelOpt's scripts know the "
        "data set by `cnn_dailymail` in its path.",
        do="Calibrate with a local file: `trtforge calibrate --data prompts.jsonl`.",
        sources=("TensorRT-LLM issue #5247",),
    ),
    Pattern(
        id="dataset-repository",
        title="calibration data not found",
        regex=r"Repository id must be 'namespace/name', got '(?P<name>[^']*)'",
        means="The hub no longer takes the bare data set name {name}.",
        do="Name it with its owner (abisee/cnn_dailymail), or calibrate with a local file.",
        sources=("TensorRT-Edge-LLM issue #29",),
    ),
    Pattern(
        id="symbol-undefined",
        title="binary packages of different builds",
        regex=r"undefined symbol: (?P<symbol>_ZN(?:K?)(?:5torch|3c10|2at)\w*)",
        means="A library was compiled against another torch than the installed one ({symbol} is missing): pip replaced "
        "torch or TensorRT-LLM inside the container.",
        do="Start from the clean image and leave its torch alone; install other packages in a virtual environment.",
        sources=("TensorRT-LLM issue #808", "TensorRT-LLM issue #2380"),
    ),
    Pattern(
        id="driver-too-old",
        title="driver too old for the container",
        regex=r"container was built for NVIDIA Driver Release (?P<needed>[\d.]*\d) or later",
        then=r"version (?P<found>[\d.]*\d) was detected",
        means="The container needs driver {needed} or later; this machine has {found}.",
        do="Update the driver, or use an older image: `trtforge doctor --image IMAGE` checks before the download.",
        sources=("TensorRT-LLM issue #23",),
    ),
)
