"""Attacks on a running `trtforge serve`: load, departures, malformed requests, killed processes, starts and stops."""

import os

# Children here always run another program: gRPC need not prepare for a fork, nor log that it could not. It reads this
# when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
