"""Logs as users reported them in public issues, shortened, with the noise and the consequences around the message."""

from tests.doctor.excerpts import ABORT, BUILD, LOADING, PYTHON, Excerpt, answered, failed_to_load

WORKER = """\
[07/07/2026-03:31:30] [TRT-LLM] [I] [executor] Loading weights
[1763683011.281418] [node7:936  :0]  ucp_context.c:2339 UCX  WARN  UCP API version is incompatible: required >= 1.20
/usr/lib/python3/dist-packages/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated.
  import pynvml  # type: ignore[import]
[07/07/2026-03:31:36] [TRT-LLM] [E] [executor] Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/tensorrt_llm/executor/worker.py", line 302, in worker_main
    worker: GenerationExecutorWorker = worker_cls(
{error}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/tensorrt_llm/executor/proxy.py", line 437, in _start_executor_workers
    raise RuntimeError(
RuntimeError: Executor worker returned error"""
"""What the LLM API prints if a worker cannot start, after warnings that are harmless."""

REPORTED = (
    Excerpt(
        "engine-plugin-length",
        {
            0: LOADING,
            1: f"{LOADING}\n[TensorRT-LLM][ERROR] Assertion failed: Expected length (362) != real length (374). This "
            "is often caused by using different TensorRT-LLM version to build engine and run engine. "
            "(/app/gptAttentionCommon.cpp:581)\n"
            "[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine (/app/tllmRuntime.cpp:72)",
        },
        rank=1,
    ),
    Excerpt(
        "engine-plugin-length",
        {
            0: f"{LOADING}\n[TensorRT-LLM][ERROR] tensorrt_llm::common::TllmException: [TensorRT-LLM][ERROR] Assertion "
            "failed: d == a + length (/app/plugins/gptAttentionCommon/gptAttentionCommon.cpp:418)",
            1: LOADING,
        },
    ),
    Excerpt(
        "engine-input-tensor",
        {
            0: f"{LOADING}\n[TensorRT-LLM][ERROR] Encountered an error in forward function: Input tensor "
            "'host_max_kv_cache_length_0' not found; expected shape: (1) (/app/runtime/tllmRuntime.cpp:124)",
            1: LOADING,
        },
        {"tensor": "host_max_kv_cache_length_0"},
    ),
    Excerpt(
        "plugin-not-found",
        {
            0: "[05/24/2024-08:20:11] [TRT] [I] Loaded engine size: 15323 MiB\n"
            "[05/24/2024-08:20:13] [TRT] [E] 3: getPluginCreator could not find plugin: Gemmtensorrt_llm version: 1\n"
            "[05/24/2024-08:20:13] [TRT] [E] 1: [pluginV2Runner.cpp::load::294] Error Code 1: Serialization "
            "(Serialization assertion creator failed.Cannot deserialize plugin since corresponding IPluginCreator not "
            "found in Plugin Registry)",
        },
        {"plugin": "Gemmtensorrt_llm"},
    ),
    Excerpt(
        "backend-placeholder",
        {
            0: "E0625 08:07:30.858565 1073 model_lifecycle.cc:654] failed to load 'tensorrt_llm' version 1: Invalid "
            "argument: unable to find backend library for backend '${triton_backend}', try specifying runtime on the "
            "model configuration.\n"
            "E0625 08:07:38.858565 1073 model_repository_manager.cc:579] Invalid argument: ensemble 'ensemble' "
            "depends on 'tensorrt_llm' which has no loaded version.",
        },
        {"key": "triton_backend"},
        style="named",
    ),
    Excerpt(
        "backend-missing",
        {
            0: 'I0120 08:28:09.425458 2049 model_lifecycle.cc:473] "loading: tensorrt_llm:1"\n'
            "E0120 08:28:09.425599 2049 model_lifecycle.cc:654] \"failed to load 'tensorrt_llm' version 1: Invalid "
            "argument: unable to find backend library for backend 'tensorrtllm', try specifying runtime on the model "
            'configuration."\n'
            "error: creating server: Internal - failed to load all models",
        },
        style="kubectl",
    ),
    Excerpt(
        "backend-symbol",
        {
            None: "| tensorrt_llm | 1 | UNAVAILABLE: Not found: unable to load shared library: "
            "/opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so: undefined symbol: "
            "_ZNK12tensorrt_llm8executor8Response11getErrorMsgB5cxx11Ev |",
        },
        {"symbol": "_ZNK12tensorrt_llm8executor8Response11getErrorMsgB5cxx11Ev"},
        rank=None,
    ),
    Excerpt(
        "backend-library",
        {
            0: f"{LOADING}\nE0711 12:00:05.000000 101 model_lifecycle.cc:638] failed to load 'tensorrt_llm' version "
            "1: Not found: unable to load shared library: libnvinfer_plugin_tensorrt_llm.so.9: cannot open shared "
            "object file: No such file or directory",
            1: LOADING,
        },
        {"library": "libnvinfer_plugin_tensorrt_llm.so.9"},
    ),
    Excerpt(
        "cross-kv-fraction",
        {
            0: failed_to_load(
                "unexpected error when creating modelInstanceState: [TensorRT-LLM][ERROR] Assertion failed: Do not "
                "set crossKvCacheFraction for decoder-only model (/workspace/trtGptModelInflightBatching.cpp:281)"
            ),
            1: LOADING,
        },
    ),
    Excerpt(
        "model-not-loaded",
        {
            0: f"{LOADING}\nE0711 12:00:06.000000 101 model_repository_manager.cc:579] Invalid argument: ensemble "
            "'ensemble' depends on 'tensorrt_llm' which has no loaded version. Model 'tensorrt_llm' loading failed "
            "with error: version 1 is at UNAVAILABLE state: Internal: who knows;",
            1: LOADING,
        },
    ),
    Excerpt(
        "gpu-shared-by-ranks",
        {
            0: "node7:5011:5092 [1] init.cc:824 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA "
            "device e3000\nnode7:5011:5092 [1] NCCL INFO init.cc:1396 -> 5\n"
            "Failed, NCCL error /app/plugins/ncclPlugin/sendPlugin.cpp:129 'invalid usage (run with NCCL_DEBUG=WARN "
            "for details)'",
            1: "Failed, NCCL error /app/plugins/ncclPlugin/recvPlugin.cpp:129 'invalid usage (run with "
            "NCCL_DEBUG=WARN for details)'",
            None: ABORT,
        },
        {"first": "0", "second": "1", "device": "e3000"},
    ),
    Excerpt(
        "nccl-invalid-usage",
        {
            None: "[11/18/2025-09:33:30] [TRT-LLM] [RANK 0] [E] Failed to initialize executor on rank 0: "
            "[TensorRT-LLM][ERROR] Assertion failed: Failed, NCCL error ../runtime/ncclCommunicator.cpp:90 'invalid "
            "usage (run with NCCL_DEBUG=WARN for details)'\n (../tensorrt_llm/runtime/ncclCommunicator.cpp:90)",
        },
    ),
    Excerpt(
        "nccl-cuda-error",
        {
            0: LOADING,
            1: f"{PYTHON}\nRuntimeError: Executor creation failed with NCCL error: [TensorRT-LLM][ERROR] Assertion "
            "failed: Failed, NCCL error ../runtime/ncclCommunicator.cpp:90 'unhandled cuda error (run with "
            "NCCL_DEBUG=INFO for details)'",
        },
        rank=1,
        style="torch",
    ),
    Excerpt(
        "mpi-slots",
        {
            None: "--------------------------------------------------------------------------\n"
            "There are not enough slots available in the system to satisfy the 2 slots\n"
            "that were requested by the application:",
        },
        rank=None,
    ),
    Excerpt(
        "mpi-slots",
        {
            None: "rank 0 using MpiPoolSession to spawn MPI processes\n"
            "--------------------------------------------------------------------------\n"
            "All nodes which are allocated for this job are already filled.\n"
            "--------------------------------------------------------------------------\n"
            "Exception in thread Thread-3 (_manager_spawn):\n"
            "Traceback (most recent call last):\n"
            '  File "/usr/lib/python3.12/threading.py", line 1073, in _bootstrap_inner\n'
            "    self.run()\n"
            "mpi4py.MPI.Exception: MPI_ERR_UNKNOWN: unknown error",
        },
        rank=None,
    ),
    Excerpt(
        "mpi-root",
        {
            None: "mpirun has detected an attempt to run as root.\n"
            "Running at root is *strongly* discouraged as any mistake (e.g., in"
        },
        rank=None,
    ),
    Excerpt(
        "mpi-init",
        {
            None: "[1743007144.736077] [1075b74dbf6d:42   :0]       ib_device.c:1332 UCX  ERROR   "
            "ibv_create_ah(dlid=49152 sl=0 port=1 src_path_bits=0) for UD mlx5 connect on mlx5_1 failed: No such "
            "device\n"
            "[1075b74dbf6d:00042] pml_ucx.c:424  Error: ucp_ep_create(proc=0) failed: Address not valid\n"
            "It looks like MPI_INIT failed for some reason; your parallel process is\n"
            "likely to abort.  There are many reasons that a parallel process can",
        },
        rank=None,
    ),
    Excerpt(
        "mpi-shared-memory",
        {
            None: "It appears as if there is not enough space for /dev/shm/vader_segment.3eef99a70454.0.c5600001.0 "
            "(the shared-memory backing\nfile). It is likely that your MPI job will now either abort or experience",
        },
        {"file": "/dev/shm/vader_segment.3eef99a70454.0.c5600001.0"},
        rank=None,
    ),
    Excerpt(
        "mpi-library",
        {
            None: "Traceback (most recent call last):\n"
            '  File "/usr/lib/python3/site-packages/tensorrt_llm/logger.py", line 19, in <module>\n'
            "    from mpi4py import MPI\n"
            "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory",
        },
        {"library": "libmpi.so.12"},
        rank=None,
    ),
    Excerpt(
        "gpus-required",
        {
            0: "Traceback (most recent call last):\n"
            '  File "/usr/local/lib/python3.10/dist-packages/tensorrt_llm/llmapi/llm.py", line 130, in __init__\n'
            "    raise RuntimeError(\n"
            "RuntimeError: Only 8 GPUs are available, but 16 are required.",
        },
        {"found": "8", "needed": "16"},
    ),
    Excerpt(
        "fp8-attention",
        {
            0: f"{BUILD}\n[TensorRT-LLM][ERROR] Assertion failed: FP8 FMHA can only be enabled on sm_89, sm_90, "
            "sm_100, sm_120 or sm_121. (/src/common/attentionOp.cpp:2109)",
            1: BUILD,
        },
    ),
    Excerpt(
        "fp4-moe",
        {
            None: WORKER.format(error="RuntimeError: Only SM100 is supported by FP4 block scale MOE"),
        },
        rank=None,
    ),
    Excerpt(
        "gpu-without-kernels",
        {
            0: "[TensorRT-LLM][ERROR] Encountered error for requestId 846930887: Encountered an error in forward "
            "function: [TensorRT-LLM][ERROR] CUDA runtime error in "
            "cub::DeviceSegmentedRadixSort::SortPairsDescending(nullptr, cub_temp_storage_size): no kernel image is "
            "available for execution on the device (/app/kernels/samplingTopPKernels.cu:1078)",
            1: LOADING,
        },
    ),
    Excerpt(
        "ptxas-gpu",
        {
            0: f"{PYTHON}\ntriton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` "
            "stderr:\n"
            "ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'",
        },
        {"sm": "121a"},
    ),
    Excerpt(
        "memory-pools-unsupported",
        {
            0: failed_to_load(
                "unexpected error when creating modelInstanceState: [TensorRT-LLM][ERROR] CUDA runtime error in "
                "cudaDeviceGetDefaultMemPool(&memPool, device): operation not supported "
                "(/app/runtime/bufferManager.cpp:170)"
            ),
            1: LOADING,
        },
    ),
    Excerpt(
        "kv-cache-full",
        {
            0: f"{LOADING}\n[TensorRT-LLM][ERROR] Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] "
            "Assertion failed: Can't allocate new blocks. No free blocks left. "
            "(/src/batch_manager/kvCacheManager.cpp:1511)",
            1: LOADING,
        },
    ),
    Excerpt(
        "cuda-allocation",
        {
            0: failed_to_load(
                "unexpected error when creating modelInstanceState: [TensorRT-LLM][ERROR] CUDA runtime error in "
                "::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory (/app/runtime/tllmBuffers.h:112)"
            ),
            1: LOADING,
        },
        style="compose",
    ),
    Excerpt(
        "batch-not-decoupled",
        {
            0: answered("Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"),
            1: LOADING,
        },
    ),
    Excerpt(
        "batch-above-limit",
        {
            0: "error: [StatusCode.INVALID_ARGUMENT] [request id: <id_unknown>] inference request batch-size must be "
            "<= 8 for 'preprocessing'",
        },
        {"limit": "8", "model": "preprocessing"},
    ),
    Excerpt(
        "input-shape",
        {
            0: "error: [StatusCode.INVALID_ARGUMENT] [request id: <id_unknown>] unexpected shape for input "
            "'input_ids' for model 'tensorrt_llm'. Expected [-1,-1], got [9]. NOTE: Setting a non-zero max_batch_size "
            "in the model config requires a batch dimension to be prepended to each input shape.",
        },
        {"input": "input_ids", "model": "tensorrt_llm", "wanted": "[-1,-1]", "sent": "[9]"},
    ),
    Excerpt(
        "inputs-missing",
        {
            0: f"{LOADING}\nE1206 10:58:56.559834 61613 model.py:345] Traceback (most recent call last):\n"
            '  File "/triton_model_repo/tensorrt_llm_bls/1/model.py", line 323, in execute\n'
            "    raise pb_utils.TritonModelException(\n"
            "c_python_backend_utils.TritonModelException: Model postprocessing - Error when running inference: "
            "[request id: <id_unknown>] expected 4 inputs but got 1 inputs for model 'postprocessing'",
            1: LOADING,
        },
        {"wanted": "4", "sent": "1", "model": "postprocessing"},
    ),
    Excerpt(
        "input-unknown",
        {
            0: "error: [StatusCode.INVALID_ARGUMENT] [request id: <id_unknown>] unexpected inference input "
            "'min_length' for model 'tensorrt_llm'",
        },
        {"input": "min_length"},
    ),
    Excerpt(
        "beam-width-differs",
        {
            0: "[TensorRT-LLM][ERROR] Encountered error for requestId 719885387: Encountered an error in forward "
            "function: [TensorRT-LLM][ERROR] Assertion failed: Request with beam width 4 differs from the max beam "
            "width 12 (/src/trtGptModelInflightBatching.cpp:401)",
            1: LOADING,
        },
    ),
    Excerpt(
        "beam-width-differs",
        {
            0: f"{PYTHON}\nAssertionError: Request beam width 1 is not equal to max_beam_width 8. This is not "
            "supported!",
        },
    ),
    Excerpt(
        "beam-width-above",
        {
            0: "[TensorRT-LLM][ERROR] Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] Assertion "
            "failed: Requested beam width 4 is larger than configured max beam width 1 "
            "(/src/trtGptModelInflightBatching.cpp:1820)",
            1: LOADING,
        },
    ),
    Excerpt(
        "queue-full",
        {0: answered("Maximum queue size of 30 has been reached, please try again later"), 1: LOADING},
    ),
    Excerpt(
        "port-in-use",
        {
            0: "E0705 08:07:40.219476055   79386 chttp2_server.cc:1080]      UNKNOWN:No address added out of total 1 "
            "resolved for '0.0.0.0:18001' {children:[UNKNOWN:Unable to configure socket {fd:180, "
            'children:[UNKNOWN:Address already in use {syscall:"bind", errno:98}]}]}\n'
            "E0705 08:07:40.219789 79386 main.cc:245] failed to start GRPC service: Unavailable - Socket "
            "'0.0.0.0:18001' already in use",
            1: LOADING,
        },
        {"host": "0.0.0.0", "port": "18001"},
    ),
    Excerpt(
        "port-in-use-openai",
        {
            None: "INFO:     Started server process [101]\n"
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        },
        {"port": "8000"},
        rank=None,
    ),
    Excerpt(
        "port-in-use-openai",
        {
            0: f"{PYTHON}\nRuntimeError: Failed to bind socket to localhost:8000: [Errno 98] Address already in use",
        },
        {"port": "8000"},
    ),
    Excerpt(
        "pytorch-architecture",
        {
            None: WORKER.format(
                error="ValueError: Unknown architecture for AutoModelForCausalLM: MiniMaxM2ForCausalLM"
            ),
        },
        {"model": "MiniMaxM2ForCausalLM"},
        rank=None,
    ),
    Excerpt(
        "executor-memory",
        {
            None: "[07/08/2025-19:47:15] [TRT-LLM] [RANK 1] [E] Failed to initialize executor on rank 1: Executor "
            "creation failed due to insufficient GPU memory.\n\n"
            "The following component could not be created: KV cache\n"
            "Total GPU memory (GiB): 140.06",
        },
        rank=1,
    ),
    Excerpt(
        "kv-cache-no-sequence",
        {
            None: WORKER.format(error="AssertionError: Impossible to fit in any sequence in kvCache"),
        },
        rank=None,
    ),
    Excerpt(
        "prompt-above-max-num-tokens",
        {
            None: 'E1118 19:56:24.568955 1 pb_stub.cc:737] "Failed to process the request(s) for model '
            "'gemma_chat_0_0', message: ValueError: The sum of prompt length (9351.0), query length (0) should not "
            "exceed max_num_tokens (8192)\\n\\nAt:\\n  "
            "/usr/local/lib/python3.12/dist-packages/tensorrt_llm/llmapi/llm.py(583): "
            '_check_arguments"',
        },
        {"prompt": "9351.0", "limit": "8192"},
        rank=None,
    ),
    Excerpt(
        "prompt-above-max-seq-len",
        {
            0: f"{PYTHON}\nValueError: Deduced max_tokens -13 is less than 0, becauseprompt length 2061 plus query "
            "length 0 is larger than max_seq_len 2048",
        },
    ),
    Excerpt(
        "executor-worker",
        {
            None: "Traceback (most recent call last):\n"
            '  File "/usr/local/lib/python3.12/dist-packages/tensorrt_llm/executor/proxy.py", line 332, in '
            "_start_executor_workers\n    raise RuntimeError(\nRuntimeError: Executor worker returned error",
        },
        rank=None,
    ),
    Excerpt(
        "tensorrt-allocation",
        {
            0: "[TensorRT-LLM][INFO] Loaded engine size: 68370 MiB\n"
            "[TensorRT-LLM][ERROR] [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)\n"
            "[TensorRT-LLM][WARNING] Requested amount of GPU memory (69568823808 bytes) could not be allocated. There "
            "may not be enough free memory for allocation to succeed.\n"
            "[TensorRT-LLM][ERROR] [deserialize.cpp::load::572] Error Code 2: OutOfMemory (Requested size was "
            "69568823808 bytes.)",
            1: LOADING,
        },
    ),
    Excerpt(
        "build-no-implementation",
        {
            0: f"{BUILD}\n[04/19/2024-14:11:41] [TRT] [E] 10: [optimizer.cpp::computeCosts::4048] Error Code 10: "
            "Internal Error (Could not find any implementation for node "
            "{ForeignNode[LLaMAForCausalLM/transformer/layers/0/attention/qkv/CAST_5]}.)\n[04/19/2024-14:11:41] "
            "[TRT-LLM] [E] Engine building failed, please check the error log.",
            1: BUILD,
        },
    ),
    Excerpt(
        "checkpoint-not-converted",
        {
            0: "Traceback (most recent call last):\n"
            '  File "/usr/local/lib/python3.12/dist-packages/tensorrt_llm/models/modeling_utils.py", line 482, in '
            "from_dict\n"
            "    model_cls = MODEL_MAP[config['architecture']]\n"
            "                          ~~~~~~^^^^^^^^^^^^^^^^\n"
            "KeyError: 'architecture'",
        },
    ),
    Excerpt(
        "transformers-too-old",
        {
            0: f"{PYTHON}\nValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers "
            "does not recognize this architecture. This could be because of an issue with the checkpoint, or because "
            "your version of Transformers is out of date.",
        },
        {"model": "qwen3"},
    ),
    Excerpt(
        "custom-code",
        {
            None: "[08/03/2026-10:00:00] [TRT-LLM] [E] Failed to initialize executor on rank 0: The repository "
            "/models/nemotron contains custom code which must be executed to correctly load the model. You can "
            "inspect the repository content at /models/nemotron .\nPlease pass the argument `trust_remote_code=True` "
            "to allow custom code to be run.",
        },
        rank=None,
    ),
    Excerpt(
        "custom-code",
        {
            0: f"{PYTHON}\nValueError: Loading /models/chatglm3-6b requires you to execute the configuration file in "
            "that repo on your local machine. Make sure you have read the code there to avoid malicious use, then set "
            "the option `trust_remote_code=True` to remove this error.",
        },
    ),
    Excerpt(
        "gated-model",
        {
            0: f"{PYTHON}\nOSError: You are trying to access a gated repo.\nMake sure to have access to it at "
            "https://huggingface.co/meta-llama/Llama-2-7b-hf.\n401 Client Error.",
        },
    ),
    Excerpt(
        "bindings-missing",
        {
            None: "Traceback (most recent call last):\n"
            '  File "/TensorRT-LLM/tensorrt_llm/_utils.py", line 32, in <module>\n'
            "    from tensorrt_llm.bindings.BuildInfo import ENABLE_MULTI_DEVICE\n"
            "ModuleNotFoundError: No module named 'tensorrt_llm.bindings'",
        },
        rank=None,
    ),
    Excerpt(
        "python-library",
        {
            None: "    from tensorrt_llm.bindings import DataType, GptJsonConfig\n"
            "ImportError: libpython3.10.so.1.0: cannot open shared object file: No such file or directory",
        },
        {"library": "libpython3.10.so.1.0"},
        rank=None,
    ),
    Excerpt(
        "cuda-python",
        {
            None: "Traceback (most recent call last):\n"
            '  File "/venv/lib/python3.12/site-packages/tensorrt_llm/_ipc_utils.py", line 20, in <module>\n'
            "    from cuda import cuda, cudart\n"
            "ImportError: cannot import name 'cuda' from 'cuda' (unknown location)",
        },
        {"name": "cuda"},
        rank=None,
    ),
    Excerpt(
        "driver-combination",
        {
            None: "ERROR: The NVIDIA Driver is present, but CUDA failed to initialize.  GPU functionality will not be "
            "available.\n   [[ System has unsupported display driver / cuda driver combination (error 803) ]]",
        },
        rank=None,
    ),
    Excerpt(
        "driver-insufficient",
        {
            0: f"{PYTHON}\nRuntimeError: CUDA driver version is insufficient for CUDA runtime version",
        },
    ),
)
