"""The type of the integer arrays in a step."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
