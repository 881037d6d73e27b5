"""Tests mirror the tree. Threads are told how to wait before anything imports torch, and nothing is found in a cache.

A test of how something is made, and a benchmark of how fast, must not find it made; nor may they write into the home
directory. Tests of the cache give it a directory of their own.
"""

import os

from trtforge.core.threads import wait_briefly

wait_briefly()
os.environ["TRTFORGE_CACHE"] = "off"
