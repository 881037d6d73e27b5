// The threads that OpenMP keeps for the calling thread.

#include "common.h"

#include <omp.h>

// Ends them; the next parallel region starts new ones.
EXPORT void release_threads() { omp_pause_resource_all(omp_pause_soft); }
