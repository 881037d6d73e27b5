"""The recipes that ship for real models, by name."""

from trtforge.core.assets import asset_directory

SHIPPED = {path.stem: path for path in asset_directory("recipes").glob("*.yaml") if not path.stem.startswith("demo-")}
FOR_THE_LLM_API = ("glm-4.5-air-fp8", "gemma-3-27b-fp8", "deepseek-r1-fp8", "deepseek-r1-nvfp4")
"""Those that no TensorRT engine runs."""
AS_PUBLISHED = ("deepseek-r1-fp8",)
"""Those whose weights are served as their publisher quantised them."""
