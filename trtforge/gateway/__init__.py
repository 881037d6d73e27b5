"""OpenAI's API over text models that KServe v2 gRPC serves: `trtforge gateway`, and a child process of `serve`."""
