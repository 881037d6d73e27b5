"""Engines and configurations that do not match the software that loads them."""

from trtforge.doctor.pattern import Pattern

_SAME_IMAGE = (
    "Build the engine in the image that serves it: `trtforge compile --dry-run` prints the image and the command."
)

PATTERNS = (
    Pattern(
        id="tensorrt-serialization-version",
        title="engine of another TensorRT version",
        regex=r"stdVersionRead == (?:kSERIALIZATION_VERSION|serializationVersion) failed"
        r".{0,300}?Current Version: (?P<here>\d+), Serialized Engine Version: (?P<engine>\d+)",
        means="The engine was built with another TensorRT version than the one that loads it: its serialisation "
        "version is {engine}, and {here} is needed.",
        do=_SAME_IMAGE,
        sources=("tensorrtllm_backend issue #190", "tensorrtllm_backend issue #531"),
    ),
    Pattern(
        id="tensorrt-library-version",
        title="engine of another TensorRT version",
        regex=r"expecting library version (?P<here>[\d.]+) got (?P<engine>[\d.]*\d), please rebuild",
        means="The engine was built with TensorRT {engine}; the TensorRT that loads it is {here}. All four numbers "
        "must be equal.",
        do=_SAME_IMAGE,
        sources=("tensorrtllm_backend issue #194", "tensorrtllm_backend issue #424"),
    ),
    Pattern(
        id="engine-compute-capability",
        title="engine of another GPU architecture",
        regex=r"expecting compute (?P<here>[\d.]+) got compute (?P<engine>[\d.]*\d), please rebuild",
        means="The engine was built on a GPU of compute capability {engine}; the GPU that loads it has {here}.",
        do="Build the engine again on a GPU of compute capability {here}; the checkpoint can stay as it is. If GPUs "
        "are mixed in this machine, choose with CUDA_VISIBLE_DEVICES.",
        sources=("TensorRT-LLM issue #222", "TensorRT-LLM issue #3031"),
    ),
    Pattern(
        id="engine-plugin-length",
        title="engine of another TensorRT-LLM release",
        regex=r"Expected length \((?P<engine>\d+)\) != real length \((?P<here>\d+)\)|d == a \+ length",
        means="A plugin in the engine was stored by another TensorRT-LLM release than the one that loads it: its data "
        "has another length.",
        do=_SAME_IMAGE,
        sources=("tensorrtllm_backend issue #375", "TensorRT-LLM issue #583"),
    ),
    Pattern(
        id="engine-input-tensor",
        title="engine of another TensorRT-LLM release",
        regex=r"Input tensor '(?P<tensor>\w{1,200})' not found; expected shape",
        means="The engine wants an input {tensor} that this TensorRT-LLM does not provide, or no longer by that name: "
        "it was built by another release.",
        do=_SAME_IMAGE,
        sources=("tensorrtllm_backend issue #212", "TensorRT-LLM source, tllmRuntime.cpp"),
    ),
    Pattern(
        id="plugin-not-found",
        title="TensorRT-LLM's plugins are not loaded",
        regex=r"getPluginCreator could not find plugin: (?P<plugin>\w{1,200})",
        means="TensorRT found no plugin {plugin}: libnvinfer_plugin_tensorrt_llm.so is not loaded, or was compiled for "
        "another TensorRT than the one that loads the engine.",
        do="Build and load engines in one TensorRT-LLM image, with its own TensorRT; other programs such as trtexec "
        "must load that library first.",
        sources=("TensorRT-LLM issue #107", "TensorRT-LLM issue #1584"),
    ),
    Pattern(
        id="engine-other-gpu-model",
        title="engine of another GPU model",
        regex=r"Using an engine plan file across different models of devices",
        means="The engine was tuned on another GPU model of the same architecture. It works, but slower than one built "
        "here.",
        do="Build the engine again on this GPU model if speed matters.",
        sources=("TensorRT-LLM issue #1826",),
        kind="warning",
    ),
    Pattern(
        id="engine-not-deserialized",
        title="engine could not be loaded",
        regex=r"Failed to deserialize cuda engine",
        means="TensorRT could not load the engine. TensorRT prints the reason one line above this one.",
        do="Read the TensorRT error above this line; usually the engine is of another TensorRT version or another GPU.",
        sources=("TensorRT-LLM issue #1838",),
        kind="effect",
    ),
    Pattern(
        id="pbtxt-placeholder",
        title="config.pbtxt with an unfilled placeholder",
        regex=r"Error parsing text-format inference\.ModelConfig: (?P<line>\d+):(?P<column>\d+): "
        r"Expected .{0,300}?got: \$",
        then=r"failed to read text proto from (?P<file>\S*config\.pbtxt)",
        means="A placeholder ${{...}} of the template is unfilled: line {line}, column {column} of {file}. "
        "fill_template.py leaves unknown and missing keys as they are, without an error.",
        do="Give the key on line {line} a value (new releases add keys), or let `trtforge package` write the "
        "repository: it refuses unfilled placeholders.",
        sources=("tensorrtllm_backend issue #501", "Triton server issue #8592"),
    ),
    Pattern(
        id="pbtxt-unreadable",
        title="config.pbtxt that Triton cannot read",
        regex=r"failed to read text proto from (?P<file>\S*config\.pbtxt)",
        means="Triton cannot parse {file}. The line above says where in the file.",
        do="Correct {file} at the line and column given above.",
        sources=("tensorrtllm_backend issue #393",),
        kind="effect",
    ),
    Pattern(
        id="backend-placeholder",
        title="config.pbtxt with an unfilled placeholder",
        regex=r"unable to find backend library for backend '\$\{(?P<key>\w{1,200})\}'",
        means="The placeholder ${{{key}}} of the template is unfilled, so Triton looks for a backend of that name.",
        do="Set backend to tensorrtllm in tensorrt_llm/config.pbtxt (fill_template.py: triton_backend:tensorrtllm), or "
        "let `trtforge package` write the repository.",
        sources=("TensorRT-LLM issue #1995", "tensorrtllm_backend issue #526"),
    ),
    Pattern(
        id="backend-missing",
        title="image without the backend",
        regex=r"unable to find (?:backend library for backend )?'(?P<backend>[^'/]{1,200})"
        r"(?:', try specifying runtime|/model\.py' for model)",
        means="This Triton has no backend {backend}: only the images whose tag contains `trtllm` have TensorRT-LLM's.",
        do="Use the image nvcr.io/nvidia/tritonserver:<release>-trtllm-python-py3; `trtforge compile --dry-run` prints "
        "the tag.",
        sources=("Triton server issue #7950", "tensorrtllm_backend issue #66"),
    ),
    Pattern(
        id="backend-symbol",
        title="binary packages of different builds",
        regex=r"undefined symbol: (?P<symbol>_ZNK?12tensorrt_llm\w*)",
        means="A library was compiled for another TensorRT-LLM release than the installed libtensorrt_llm.so "
        "({symbol} is missing): pip or a mount replaced one of the two.",
        do="Start from a clean image whose Triton and TensorRT-LLM belong together, and install nothing over them.",
        sources=("tensorrtllm_backend issue #662", "TensorRT-LLM issue #1408"),
    ),
    Pattern(
        id="backend-library",
        title="library not found",
        regex=r"unable to load shared library: (?P<library>[^:]{1,300}): cannot open shared object file",
        means="Triton's backend needs {library}, which is in no directory that the loader searches.",
        do="Use an image with TensorRT-LLM (tag with `trtllm`), and keep its LD_LIBRARY_PATH when you extend it: "
        "TensorRT-LLM's libraries are in tensorrt_llm/libs of the Python packages and in "
        "/opt/tritonserver/backends/tensorrtllm.",
        sources=("tensorrtllm_backend issue #545", "tensorrtllm_backend issue #184", "djl-serving pull request #1988"),
    ),
    Pattern(
        id="cross-kv-fraction",
        title="parameter of encoder-decoder models",
        regex=r"Do not set crossKvCacheFraction for decoder-only model",
        means="cross_kv_cache_fraction is set; only models with an encoder have a cache for cross attention.",
        do="Leave cross_kv_cache_fraction of tensorrt_llm/config.pbtxt empty.",
        sources=("tensorrtllm_backend issue #712", "TensorRT-LLM source, trtGptModelInflightBatching.cpp"),
    ),
    Pattern(
        id="model-not-loaded",
        title="a model could not be loaded",
        regex=r"depends on '(?P<model>[^']{1,200})' which has no loaded version|failed to load all models",
        means="Triton ends, or leaves models out, because a model that it needs could not be loaded.",
        do="Read the first error above this line: it says why the model was not loaded.",
        sources=("TensorRT-LLM issue #1995", "Triton server issue #7950"),
        kind="effect",
    ),
    Pattern(
        id="engine-config-missing",
        title="engine directory without a config.json",
        regex=r"json\.exception\.parse_error\.101.{0,300}unexpected end of input",
        means="The engine's config.json is missing or empty: the backend parses it without checking that it "
        "exists, so a wrong engine directory looks like broken JSON.",
        do="Check that gpt_model_path in tensorrt_llm/config.pbtxt is the engine's directory as the server's container "
        "sees it, with config.json and one rank file for each rank.",
        sources=("tensorrtllm_backend issue #207",),
    ),
    Pattern(
        id="engine-config-layout",
        title="engine config.json of another release",
        regex=r"json\.exception\.out_of_range\.403.{0,300}key '(?P<key>[^']{1,200})' not found",
        means="The engine's config.json has no key {key}: it was written by another TensorRT-LLM release than the one "
        "that loads it.",
        do="Serve with the release that built the engine (`version` in its config.json), or build it again.",
        sources=("Triton server issue #6878", "tensorrtllm_backend issue #297"),
        noise_as_warning=True,
    ),
    Pattern(
        id="parameter-left-out",
        title="optional parameter left out",
        regex=r"Parameter .{0,200} cannot be read from json",
        means="An optional key is not in config.json; the backend uses its default.",
        do="Nothing: this is not the cause.",
        sources=("tensorrtllm_backend issue #235",),
        kind="harmless",
    ),
    Pattern(
        id="optional-value-left-out",
        title="optional parameter left out",
        regex=r"Optional value for parameter .{0,200} will not be set",
        means="An optional key is not in config.pbtxt; the backend uses its default.",
        do="Nothing: this is not the cause.",
        sources=("tensorrtllm_backend issue #235",),
        kind="harmless",
    ),
)
