"""The recipes that ship for real models, by name."""

from trtforge.core.assets import asset_directory

SHIPPED = {path.stem: path for path in asset_directory("recipes").glob("*.yaml") if not path.stem.startswith("demo-")}
AS_PUBLISHED = ("deepseek-r1-fp8", "gpt-oss-20b-mxfp4", "gpt-oss-120b-mxfp4")
"""Those whose weights are served as their publisher quantised them."""
FOR_THE_LLM_API = (
    "glm-4.5-air-fp8",
    "gemma-3-27b-fp8",
    "deepseek-r1-nvfp4",
    "llama-4-scout-fp8",
    "llama-4-scout-nvfp4",
    "qwen3-next-80b-fp8",
    "qwen3-next-80b-nvfp4",
    *AS_PUBLISHED,
)
"""Those that no TensorRT engine runs."""
WITHOUT_SHARED_BLOCKS = ("qwen3-next-80b-fp8", "qwen3-next-80b-nvfp4")
"""Those of models with linear attention, whose states are in no KV block."""
