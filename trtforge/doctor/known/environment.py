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
        regex=r"The given huggingface model architecture (?P<model>[\w.-]+) is not supported in TRT-LLM yet",
        means="The architecture of this model ({model}) is not known to this release's engine builder.",
        do=_NO_ENGINE,
        sources=("TensorRT-LLM issue #5450", "TensorRT-LLM source, models/automodel.py"),
    ),
    Pattern(
        id="transformers-too-old",
        title="transformers is too old for the model",
        regex=r"model type `?(?P<model>[\w.-]+)`? but Transformers does not recognize this architecture",
        means="The installed transformers does not know {model}: the model is newer than the image.",
        do="Use a newer TensorRT-LLM release; another transformers inside the image often does not fit its "
        "TensorRT-LLM.",
        sources=("TensorRT-LLM issue #4684", "TensorRT-LLM issue #10739"),
    ),
    Pattern(
        id="custom-code",
        title="model with its own code",
        regex=r"(?:Error|on rank \d+): (?:The repository .{1,300}contains custom code which must be executed"
        r"|Loading .{1,300}requires you to execute)",
        means="The model's configuration, tokenizer or network is Python code in its directory, which transformers "
        "runs only if it is allowed to.",
        do="Read the code, then set trust_remote_code (trtllm-serve --trust_remote_code, LLM(trust_remote_code=True)), "
        "or take a release whose transformers knows the architecture.",
        sources=("TensorRT-LLM issue #2357", "Model-Optimizer pull request #2056"),
    ),
    Pattern(
        id="gated-model",
        title="no access to the model",
        regex=r"You are trying to access a gated repo|Cannot access gated repo for url",
        means="The model on the hub requires its licence to be accepted and a token; this process has none with "
        "access.",
        do="Accept the licence on the model's page, and give the process the account's token (HF_TOKEN; in a container "
        "-e HF_TOKEN).",
        sources=("transformers source, utils/hub.py",),
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
        id="pip-resolver",
        title="pip's note about dependencies",
        regex=r"pip's dependency resolver does not currently take into account",
        means="pip installed the package and lists others whose requirements it does not meet now.",
        do="Nothing if the listed packages are not used: this is not the cause.",
        sources=("pip source, commands/install.py",),
        kind="harmless",
    ),
    Pattern(
        id="bindings-missing",
        title="TensorRT-LLM is not installed completely",
        regex=r"No module named 'tensorrt_llm\.bindings(?:\.\w+)?'",
        means="Python found TensorRT-LLM's sources without the compiled part: a checkout in the current directory or "
        "in PYTHONPATH hides the installed package, or the wheel is for another Python.",
        do="Start in another directory than the checkout, and use the Python that the wheel was made for (3.10 or "
        "3.12); a checkout needs scripts/build_wheel.py first.",
        sources=("TensorRT-LLM issue #1549", "TensorRT-LLM issue #1876", "TensorRT-LLM issue #2599"),
    ),
    Pattern(
        id="python-library",
        title="Python without its shared library",
        regex=r"(?P<library>libpython3\.\d{1,4}\.so[\w.]{0,20}): cannot open shared object file",
        means="TensorRT-LLM's compiled part needs {library}, and this Python (conda, uv or pyenv) has it in no "
        "directory that the loader searches.",
        do="Add the `lib` directory of that Python to LD_LIBRARY_PATH before Python starts, or use the image.",
        sources=("TensorRT-LLM issue #6102", "TensorRT-LLM issue #7263"),
    ),
    Pattern(
        id="cuda-python",
        title="cuda-python is too new",
        regex=r"cannot import name '(?P<name>cuda|cudart)' from 'cuda'",
        means="cuda-python 13 no longer has the module {name}, which this TensorRT-LLM imports; pip took the newest.",
        do="Install `cuda-python>=12,<13` beside it, or use a newer TensorRT-LLM.",
        sources=("TensorRT-LLM pull request #6703", "Dynamo pull request #2379"),
    ),
    Pattern(
        id="driver-combination",
        title="driver does not fit the CUDA libraries",
        regex=r"[Ss]ystem has unsupported display driver / cuda driver combination",
        means="The CUDA driver library that the process loaded and the kernel's driver are of different versions "
        "(CUDA error 803): the driver was updated without a restart, or the container has a libcuda of its own.",
        do="Restart after a driver update. In a container, remove a mounted or installed libcuda and "
        "/usr/local/cuda/compat from LD_LIBRARY_PATH; otherwise update the driver: `trtforge doctor --image IMAGE` "
        "names the one that is needed.",
        sources=("CUDA documentation, cudaErrorSystemDriverMismatch", "TensorRT-LLM issue #189"),
    ),
    Pattern(
        id="driver-insufficient",
        title="driver too old, or no GPU",
        regex=r"CUDA driver version is insufficient for CUDA runtime version",
        means="The driver is older than the CUDA runtime of this process, or the container has no GPU at all.",
        do="Start the container with --gpus all; if it was, update the driver: `trtforge doctor --image IMAGE` names "
        "the one that the image needs.",
        sources=("CUDA documentation, cudaErrorInsufficientDriver",),
        noise_as_warning=True,
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
