import trtforge.runtime  # noqa: F401  (before torch: it decides how torch's threads wait)
