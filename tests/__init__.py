"""Tests mirror the tree. Threads are told how to wait before anything imports torch."""

from trtforge.core.threads import wait_briefly

wait_briefly()
