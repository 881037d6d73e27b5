"""OpenAI's API for text models served over KServe v2 gRPC: `trtforge gateway`, and a child process of `serve`."""
