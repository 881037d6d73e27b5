"""Arrays of integers, of which steps are made."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
