"""Logs as they look when each known message appears: several ranks, noise, and what follows from the error."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Streams = Mapping[int | None, str]
"""The lines of each rank, and under None what the launcher writes."""


@dataclass(frozen=True)
class Excerpt:
    """A log in which the pattern `id` must be found. `values`: what it must capture. `rank`: where it is."""

    id: str
    streams: Streams
    values: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = 0
    style: str = "mpirun"

    def lines(self) -> dict[int | None, list[str]]:
        """Each rank's lines with the prefixes of the style."""
        return {
            rank: [tagged(line, rank, self.style) for line in text.splitlines()] for rank, text in self.streams.items()
        }

    def text(self) -> str:
        """One rank behind the other."""
        return "\n".join(line for lines in self.lines().values() for line in lines) + "\n"


def tagged(line: str, rank: int | None, style: str) -> str:
    """A line as `mpirun --tag-output`, Open MPI 5, torch, docker compose or kubectl prints it."""
    if rank is None:
        return line
    return {
        "mpirun": f"[1,{rank}]<stderr>:{line}",
        "prte": f"[prterun-node7-4242@1,{rank}]<stdout>: {line}",
        "timestamped": f"Thu Jul 11 12:00:0{rank} 2024[1,{rank}]<stderr>:{line}",
        "torch": f"[rank{rank}]: {line}",
        "compose": f"triton-models-1    | [1,{rank}]<stderr>:{line}",
        "named": f"\x1b[36mtriton  | \x1b[0m[1,{rank}]<stderr>:{line}",
        "kubectl": f"[pod/llama-{rank}/triton] [1,{rank}]<stderr>:{line}",
    }[style]


LOADING = """\
I0711 12:00:01.000001 101 model_lifecycle.cc:472] "loading: tensorrt_llm:1"
[TensorRT-LLM][INFO] Engine version 1.2.1 found in the config file, assuming engine(s) built by new builder API.
[TensorRT-LLM][WARNING] Optional value for parameter kv_cache_free_gpu_mem_fraction will not be set.
[TensorRT-LLM][WARNING] [json.exception.out_of_range.403] key 'lora_config' not found"""

ABORT = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 1.
--------------------------------------------------------------------------"""

PYTHON = """\
Traceback (most recent call last):
  File "/app/examples/quantization/quantize.py", line 142, in <module>
    main(args)
  File "/app/examples/quantization/quantize.py", line 88, in main
    quantize_and_export(**vars(args))"""

BUILD = """\
[07/11/2024-12:00:00] [TRT-LLM] [I] Set gpt_attention_plugin to float16.
[07/11/2024-12:00:01] [TRT] [W] Unused Input: position_ids
[07/11/2024-12:00:02] [TRT-LLM] [I] Build TensorRT engine Unnamed Network 0"""


def failed_to_load(message: str) -> str:
    """A model that Triton could not load, as Triton 2.4x and later report it."""
    return (
        f"{LOADING}\n"
        f'E0711 12:00:05.120000 101 backend_model.cc:692] "ERROR: Failed to create instance: {message}"\n'
        "E0711 12:00:05.130000 101 model_lifecycle.cc:641] \"failed to load 'tensorrt_llm' version 1: Internal\"\n"
        "I0711 12:00:05.140000 101 model_lifecycle.cc:776] \"failed to load 'tensorrt_llm'\""
    )


def answered(message: str) -> str:
    """A request that a server refused."""
    return (
        f"{LOADING}\n"
        'I0711 12:00:09.000000 101 http_server.cc:4637] "Started HTTPService at 0.0.0.0:8000"\n'
        f"[TensorRT-LLM][ERROR] Cannot process new request: {message}\n"
        'I0711 12:00:12.000000 101 http_server.cc:185] "HTTP request: 0 /v2/health/ready"'
    )


EXCERPTS = (
    Excerpt(
        "tensorrt-serialization-version",
        {
            0: failed_to_load("unexpected error when creating modelInstanceState"),
            1: f"{LOADING}\n"
            "[TensorRT-LLM][ERROR] 1: [stdArchiveReader.cpp::StdArchiveReader::42] Error Code 1: Serialization "
            "(Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. "
            "Note: Current Version: 226, Serialized Engine Version: 228)\n"
            "[TensorRT-LLM][ERROR] 4: [runtime.cpp::deserializeCudaEngine::66] Error Code 4: Internal Error\n"
            "[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine "
            "(/app/runtime/tllmRuntime.cpp:46)",
            None: ABORT,
        },
        {"here": "226", "engine": "228"},
        rank=1,
    ),
    Excerpt(
        "tensorrt-library-version",
        {
            0: "[07/11/2024-12:00:09] [TRT] [E] 4: [runtime.cpp::deserializeCudaEngine::66] Error Code 4",
            1: "[07/11/2024-12:00:07] [TRT] [E] 6: The engine plan file is not compatible with this version of "
            "TensorRT, expecting library version 9.2.0.4 got 9.2.0.5, please rebuild.\n"
            "[07/11/2024-12:00:07] [TRT] [E] 4: [runtime.cpp::deserializeCudaEngine::66] Error Code 4: Internal Error",
        },
        {"here": "9.2.0.4", "engine": "9.2.0.5"},
        rank=1,
        style="prte",
    ),
    Excerpt(
        "engine-compute-capability",
        {
            0: "[07/11/2024-12:00:07] [TRT] [I] Loaded engine size: 161 MiB\n"
            "[07/11/2024-12:00:07] [TRT] [E] 6: The engine plan file is generated on an incompatible device, "
            "expecting compute 8.6 got compute 8.0, please rebuild.\n"
            "[07/11/2024-12:00:07] [TRT] [E] 2: [engine.cpp::deserializeEngine::1148] Error Code 2: Internal Error\n"
            "Traceback (most recent call last):\n"
            '  File "/app/run.py", line 176, in __prepare\n'
            "    assert self.engine is not None\n"
            "AssertionError",
            1: "[07/11/2024-12:00:06] [TRT] [I] Loaded engine size: 161 MiB",
        },
        {"here": "8.6", "engine": "8.0"},
    ),
    Excerpt(
        "engine-not-deserialized",
        {
            0: LOADING,
            1: f"{LOADING}\n"
            "[TensorRT-LLM][ERROR] 3: [runtime.cpp::deserializeCudaEngine::57] Error Code 3: API Usage Error (blob "
            "size)\n[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine "
            "(/app/tllmRuntime.cpp:72)\n1       0x7f1b3c8 tensorrt_llm::common::throwRuntimeError(char const*, int, "
            "std::string const&) + 102",
            None: ABORT,
        },
        rank=1,
    ),
    Excerpt(
        "pbtxt-placeholder",
        {
            None: "[libprotobuf ERROR /tmp/tritonbuild/protobuf/text_format.cc:335] Error parsing text-format "
            "inference.ModelConfig: 29:17: Expected integer or identifier, got: $\n"
            "E0711 12:00:03.516262 976 model_repository_manager.cc:1309] Poll failed for model directory 'ensemble': "
            "failed to read text proto from /models/ensemble/config.pbtxt\n"
            "E0711 12:00:03.519087 976 model_repository_manager.cc:1309] Poll failed for model directory "
            "'postprocessing': failed to read text proto from /models/postprocessing/config.pbtxt",
        },
        {"line": "29", "column": "17", "file": "/models/ensemble/config.pbtxt"},
        rank=None,
    ),
    Excerpt(
        "pbtxt-unreadable",
        {
            0: "[libprotobuf ERROR /tmp/tritonbuild/protobuf/text_format.cc:317] Error parsing text-format "
            "inference.ModelConfig: 83:13: Expected identifier, got: {\n"
            "E0711 12:00:03.140227 124 model_repository_manager.cc:2063] Poll failed for model directory 'ensemble': "
            "failed to read text proto from /models/ensemble/config.pbtxt",
            1: LOADING,
        },
        {"file": "/models/ensemble/config.pbtxt"},
    ),
    Excerpt(
        "engine-config-missing",
        {
            0: failed_to_load(
                "unexpected error when creating modelInstanceState: [json.exception.parse_error.101] parse error at "
                "line 1, column 1: syntax error while parsing value - unexpected end of input; expected '['"
            ),
            1: LOADING,
        },
        style="compose",
    ),
    Excerpt(
        "engine-config-layout",
        {
            0: failed_to_load(
                "unexpected error when creating modelInstanceState: [json.exception.out_of_range.403] key "
                "'use_context_fmha_for_generation' not found"
            ),
            1: LOADING,
        },
        {"key": "use_context_fmha_for_generation"},
    ),
    Excerpt(
        "mpi-size",
        {
            0: f"{LOADING}\n"
            "terminate called after throwing an instance of 'tensorrt_llm::common::TllmException'\n"
            "  what():  [TensorRT-LLM][ERROR] Assertion failed: mpiSize == tp * pp (/app/runtime/worldConfig.cpp:80)\n"
            "1       0x7f923a86a645 /opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so(+0x17645)\n"
            "[node7:00101] *** Process received signal ***",
            1: LOADING,
            None: ABORT,
        },
    ),
    Excerpt(
        "mpi-size-counted",
        {0: failed_to_load("[TensorRT-LLM][ERROR] Assertion failed: MPI size 1 != TP size 2 * PP size 3"), 1: LOADING},
        {"ranks": "1", "tp": "2", "pp": "3"},
    ),
    Excerpt(
        "mpi-world-size-executor",
        {
            0: failed_to_load(
                "[TensorRT-LLM][ERROR] Assertion failed: With communicationMode kLEADER, MPI worldSize is expected to "
                "be equal to tp*pp*cp when participantIds are not specified (/app/executor/executorImpl.cpp:375)"
            ),
            1: LOADING,
        },
        style="timestamped",
    ),
    Excerpt(
        "engine-world-size",
        {
            0: "Traceback (most recent call last):\n"
            '  File "/app/examples/run.py", line 421, in <module>\n'
            "    main(args)\n"
            "AssertionError: Engine world size (2 * 1) != Runtime world size (1)",
            1: "Traceback (most recent call last):\n"
            '  File "/app/examples/run.py", line 421, in <module>\n'
            "    main(args)\n"
            "AssertionError: Engine world size (2 * 1) != Runtime world size (1)",
        },
        {"tp": "2", "pp": "1", "ranks": "1"},
        style="torch",
    ),
    Excerpt("mpi-abort", {0: LOADING, 1: LOADING, None: ABORT}, {"rank": "1"}, rank=None),
    Excerpt(
        "slurm-pmi",
        {
            None: "[node7:65012] OPAL ERROR: Error in file pmix2x_client.c at line 112",
            0: "PMI2_Init failed to initialize.  Return code: 14\n"
            'The application appears to have been direct launched using "srun",',
            1: "PMI2_Init failed to initialize.  Return code: 14",
        },
    ),
    Excerpt(
        "peer-access",
        {
            0: f"{LOADING}\n[TensorRT-LLM][INFO] Rank 0 is using GPU 0",
            1: f"{LOADING}\n[TensorRT-LLM][ERROR] [TensorRT-LLM][ERROR] CUDA runtime error in error: peer access "
            "is not "
            "supported between these two devices (/app/runtime/ipcUtils.cpp:43)",
            None: ABORT,
        },
        rank=1,
    ),
    Excerpt(
        "peer-access-between",
        {
            0: f"{PYTHON}\nRuntimeError: Can't enable access between nodes 0 and 1",
            1: f"{PYTHON}\nRuntimeError: Can't enable access between nodes 0 and 1",
        },
        {"first": "0", "second": "1"},
        style="torch",
    ),
    Excerpt(
        "nccl-system-error",
        {
            0: LOADING,
            1: f"{LOADING}\nFailed, NCCL error /app/tensorrt_llm/cpp/plugins/allreducePlugin.cpp:184 'unhandled system "
            "error (run with NCCL_DEBUG=INFO for details)'",
        },
        rank=1,
    ),
    Excerpt(
        "fp8-hardware",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:05] [TRT] [E] 9: Networks with FP8 Q/DQ layers require hardware with FP8 "
            "support.\n[07/11/2024-12:00:05] [TRT] [E] 4: [network.cpp::validate::2926] Error Code 4: Internal Error",
            1: BUILD,
        },
    ),
    Excerpt(
        "fp8-attention",
        {
            0: f"{BUILD}\n[TensorRT-LLM][ERROR] Assertion failed: FP8 FMHA cannot be enabled on Pre-Hopper Arch. "
            "(/app/plugins/gptAttentionCommon.cpp:394)",
            1: BUILD,
        },
    ),
    Excerpt(
        "fp8-block-scales",
        {
            0: LOADING,
            1: f"{LOADING}\n{PYTHON}\nRuntimeError: [TensorRT-LLM][ERROR] Unsupported SM version for FP8 block scaling "
            "GEMM",
        },
        rank=1,
    ),
    Excerpt(
        "reuse-without-paged-context",
        {
            0: failed_to_load(
                "unexpected error when creating modelInstanceState: [TensorRT-LLM][ERROR] Assertion failed: When KV "
                "cache block reuse is set, model has to be built with paged context FMHA support"
            ),
            1: LOADING,
        },
    ),
    Excerpt(
        "draft-tokens",
        {0: answered("Number of draft tokens (56) is larger than maximum number of draft tokens (0)"), 1: LOADING},
        {"asked": "56", "built": "0"},
    ),
    Excerpt(
        "lora-rank",
        {0: answered("Invalid low_rank (1024). low_rank must be smaller than mMaxLowRank (64)"), 1: LOADING},
        {"asked": "1024", "built": "64"},
    ),
    Excerpt(
        "lora-task-unknown",
        {
            0: answered(
                "[TensorRT-LLM][ERROR] Assertion failed: LoRA task 3 not found in cache. Please send LoRA weights with "
                "request (/app/batch_manager/peftCacheManager.cpp:182)"
            ),
            1: LOADING,
        },
        {"task": "3"},
    ),
    Excerpt(
        "lora-cache-full",
        {
            0: answered("Error storing task=1 in PEFT cache -- Cache is full. There are no done tasks to evict"),
            1: LOADING,
        },
        {"task": "1"},
    ),
    Excerpt(
        "prompt-too-long",
        {0: answered("Prompt length (5056) exceeds maximum sequence length (2048)."), 1: LOADING},
        {"prompt": "5056", "limit": "sequence", "built": "2048"},
    ),
    Excerpt(
        "kv-cache-below-one-sequence",
        {
            0: failed_to_load(
                "[TensorRT-LLM][ERROR] Assertion failed: maxTokensInPagedKvCache (128) must be large enough to process "
                "at least 1 sequence to completion (/app/batch_manager/trtGptModelInflightBatching.cpp:195)"
            ),
            1: LOADING,
        },
    ),
    Excerpt(
        "kv-cache-manager-defect",
        {
            0: answered("[TensorRT-LLM][ERROR] Assertion failed: mNextBlocks.empty() (kvCacheManager.cpp:151)"),
            1: answered("[TensorRT-LLM][ERROR] Assertion failed: mNextBlocks.empty() (kvCacheManager.cpp:151)"),
        },
    ),
    Excerpt(
        "outside-profile",
        {
            0: "[TensorRT-LLM][ERROR] 3: [executionContext.cpp::setInputShape::2309] Error Code 3: API Usage Error "
            "(Parameter check failed at: runtime/api/executionContext.cpp::setInputShape::2309, condition: "
            "satisfyProfile Runtime dimension does not satisfy any optimization profile.)",
            1: LOADING,
        },
    ),
    Excerpt(
        "outside-profile-range",
        {
            0: f"{PYTHON}\nValueError: Couldn't assign input_ids with shape torch.Size([7, 346]), engine supports "
            "[min, opt, max] = [(1, 1), (2, 1), (4, 1024)]",
            1: LOADING,
        },
        {"tensor": "input_ids", "shape": "torch.Size([7, 346])", "range": "[(1, 1), (2, 1), (4, 1024)]"},
        style="torch",
    ),
    Excerpt(
        "shared-memory",
        {
            0: f"{LOADING}\n"
            "E0711 12:00:05.000000 101 model_lifecycle.cc:641] \"failed to load 'postprocessing' version 1: Internal: "
            "Unable to initialize shared memory key 'prefix0_2' to requested size (67108864 bytes). If you are running "
            "Triton inside docker, use '--shm-size' flag. Error: No space left on device\"",
            1: LOADING,
        },
        {"key": "prefix0_2", "size": "67108864"},
    ),
    Excerpt(
        "streaming-not-decoupled",
        {0: answered("Streaming is only supported if model is deployed using decoupled mode."), 1: LOADING},
    ),
    Excerpt(
        "decoupled-without-stream",
        {
            0: f"{LOADING}\n"
            "E0711 12:00:12.000000 101 infer_handler.cc:133] \"ModelInfer RPC doesn't support models with decoupled "
            'transaction policy"',
            1: LOADING,
        },
    ),
    Excerpt(
        "decoupled-returned",
        {
            0: f"{LOADING}\n"
            'E0711 12:00:12.000000 101 pb_stub.cc:778] "Failed to process the request(s) for model '
            "'preprocessing_0_0', message: Python model 'preprocessing_0_0' is using the decoupled mode and the "
            "execute function must return "
            'None."',
            1: LOADING,
        },
    ),
    Excerpt(
        "lists-posted-to-engine",
        {
            0: f"{LOADING}\n"
            "E0711 12:00:12.000000 101 http_server.cc:3183] \"Unable to parse 'data': Shape does not match true "
            "shape of 'data' field\"",
            1: LOADING,
        },
    ),
    Excerpt(
        "batched-request",
        {0: answered("Expected batch dimension to be 1 for each request for input tensor input_ids"), 1: LOADING},
    ),
    Excerpt(
        "batch-sizes-differ",
        {
            0: f"{LOADING}\n"
            "E0711 12:00:12.000000 101 infer_handler.cc:133] \"[request id: <id_unknown>] input 'input_ids' batch size "
            "does not match other inputs for 'tensorrt_llm'\"",
            1: LOADING,
        },
        {"input": "input_ids"},
    ),
    Excerpt(
        "client-data-type",
        {
            0: f"{LOADING}\n"
            "error: [StatusCode.INVALID_ARGUMENT] [request id: <id_unknown>] inference input 'end_id' data-type is "
            "'INT32', but model 'tensorrt_llm' expects 'UINT32'",
            1: LOADING,
        },
        {"input": "end_id", "sent": "INT32", "wanted": "UINT32"},
    ),
    Excerpt(
        "port-in-use",
        {
            0: f"{LOADING}\n"
            'E0711 12:00:12.000000 101 main.cc:244] "failed to start GRPC service: Unavailable - Socket '
            "'0.0.0.0:8001' "
            'already in use"',
            1: LOADING,
        },
        {"host": "0.0.0.0", "port": "8001"},
    ),
    Excerpt(
        "guided-decoding-off",
        {
            0: answered(
                "Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup. Please provide a "
                "valid GuidedDecodingConfig to setup GuidedDecoder."
            ),
            1: LOADING,
        },
    ),
    Excerpt(
        "python-stub",
        {
            0: f"{LOADING}\n"
            'E0711 12:00:05.000000 101 pb_stub.cc:402] "Failed to initialize Python stub: ImportError: libfoo.so"\n'
            'E0711 12:00:06.000000 101 backend_model.cc:692] "ERROR: Failed to create instance: Stub process '
            "'preprocessing_0_0' is not healthy.\"",
            1: LOADING,
        },
        {"model": "preprocessing_0_0"},
    ),
    Excerpt(
        "build-out-of-memory",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:05] [TRT] [E] 2: [virtualMemoryBuffer.cpp::resizePhysical::140] Error "
            "Code 2: "
            "OutOfMemory (no further information)\n"
            "[07/11/2024-12:00:06] [TRT-LLM] [E] Engine building failed, please check the error log.",
            1: BUILD,
        },
    ),
    Excerpt(
        "build-scratch-space",
        {
            0: BUILD,
            1: f"{BUILD}\n[07/11/2024-12:00:05] [TRT] [E] IBuilder::buildSerializedNetwork: Error Code 4: "
            "Internal Error "
            "(Internal error: plugin node Llama/layers/0/attention/PLUGIN_V2_GPTAttention_0 requires 56405524864 bytes "
            "of scratch space, but only 47697362944 is available.)",
        },
        {"needed": "56405524864", "free": "47697362944"},
        rank=1,
    ),
    Excerpt(
        "build-tactic-memory",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:05] [TRT] [E] Tactic Device request: 41472MB Available: 40338MB. Device "
            "memory is insufficient to use tactic.",
            1: BUILD,
        },
        {"needed": "41472MB", "free": "40338MB"},
    ),
    Excerpt(
        "build-no-format",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:05] [TRT] [E] 9: LLaMAForCausalLM/transformer/layers/0/attention: "
            "could not "
            "find any supported formats consistent with input/output data types",
            1: BUILD,
        },
    ),
    Excerpt(
        "killed",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:03] [TRT] [W] Invalid timing cache, using freshly created one",
            1: BUILD,
            None: "Killed",
        },
        rank=None,
    ),
    Excerpt(
        "killed",
        {
            0: BUILD,
            None: "mpirun noticed that process rank 1 with PID 0 on node node7 exited on signal 9 (Killed).\n"
            "triton-models-1 exited with code 137",
        },
        rank=None,
    ),
    Excerpt(
        "build-option-unknown",
        {
            None: "usage: trtllm-build [-h] [--checkpoint_dir CHECKPOINT_DIR] [--output_dir OUTPUT_DIR]\n"
            "trtllm-build: error: unrecognized arguments: --max_output_len 1024 --use_custom_all_reduce disable"
        },
        {"arguments": "--max_output_len 1024 --use_custom_all_reduce disable"},
        rank=None,
    ),
    Excerpt("trtllm-build-gone", {None: "build.sh: line 12: trtllm-build: command not found"}, rank=None),
    Excerpt(
        "tensorrt-backend-gone",
        {0: f"{PYTHON}\nValueError: backend='tensorrt' is not supported, expected one of 'pytorch', '_autodeploy'"},
        style="torch",
    ),
    Excerpt(
        "tensors-missing",
        {
            0: "Traceback (most recent call last):\n"
            '  File "/usr/lib/python3/dist-packages/tensorrt_llm/models/modeling_utils.py", line 421, in load\n'
            '    raise RuntimeError(f"Required but not provided tensors:{required}")\n'
            "RuntimeError: Required but not provided tensors:{'transformer.layers.61.attention.qkv.per_channel_scale', "
            "'transformer.layers.3.mlp.fc.per_channel_scale'}",
            1: BUILD,
        },
        {"first": "transformer.layers.61.attention.qkv.per_channel_scale"},
    ),
    Excerpt(
        "tensor-names-differ",
        {
            0: f"{PYTHON}\nRuntimeError: Provided tensor names are different from those expected by the engine.\n"
            "Expected but not provided tensors: {'lm_head.weight'}",
            1: BUILD,
        },
    ),
    Excerpt(
        "tensor-shape-differs",
        {
            0: BUILD,
            1: f"{PYTHON}\nRuntimeError: Encounter error 'The value updated is not the same shape as the original. "
            "Updated: (32002, 4096), original: (32000, 4096)' for parameter 'transformer.vocab_embedding.weight'",
        },
        {"stored": "32002, 4096", "expected": "32000, 4096"},
        rank=1,
    ),
    Excerpt(
        "calibration-out-of-memory",
        {
            0: f"{PYTHON}\n"
            '  File "/usr/lib/python3/modelopt/torch/quantization/model_calib.py", line 61, in calibrate\n'
            "    forward_loop(model)\n"
            "    ^^^^^^^^^^^^^^^^^^^\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity "
            "of 79.15 GiB of which 1.02 GiB is free.",
            1: "Loading checkpoint shards: 100%",
        },
        {"size": "1.96 GiB"},
        style="torch",
    ),
    Excerpt(
        "gpu-out-of-memory",
        {
            0: LOADING,
            1: "Traceback (most recent call last):\n"
            '  File "/srv/serve.py", line 12, in <module>\n'
            "    model.to('cuda')\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 1 is full.",
        },
        {"size": "224.00 MiB"},
        rank=1,
        style="torch",
    ),
    Excerpt(
        "cuda-out-of-memory",
        {
            0: LOADING,
            1: "Traceback (most recent call last):\n"
            '  File "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py", line 125, in forward\n'
            "    return F.linear(input, self.weight, self.bias)\n"
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        },
        rank=1,
        style="torch",
    ),
    Excerpt(
        "cuda-out-of-memory",
        {
            0: "Traceback (most recent call last):\n"
            '  File "/usr/lib/python3/dist-packages/torch/cuda/__init__.py", line 412, in _lazy_init\n'
            "    torch._C._cuda_init()\n"
            "torch.AcceleratorError: CUDA error: out of memory\n"
            "CUDA kernel errors might be asynchronously reported at some other API call.",
        },
    ),
    Excerpt(
        "offloaded-to-cpu",
        {
            0: "[07/11/2024-12:00:58] Some parameters are on the meta device because they were offloaded to the cpu.\n"
            f"{PYTHON}\nNotImplementedError: Cannot copy out of meta tensor; no data!",
            1: "[07/11/2024-12:00:58] [TRT-LLM] [I] Calibrating batch 0",
        },
    ),
    Excerpt(
        "meta-tensor",
        {0: f"{PYTHON}\nNotImplementedError: Cannot copy out of meta tensor; no data!", 1: "Calibrating batch 511"},
        style="torch",
    ),
    Excerpt(
        "awq-group",
        {
            0: "Cannot export model to the model_config. The modelopt-optimized model state_dict (including the "
            "quantization factors) is saved to /out/modelopt_model.0.pth using torch.save for further inspection.\n"
            "Detailed export error: Weight shape is not divisible for block size for block quantization.\n"
            "Traceback (most recent call last):\n"
            '  File "/usr/lib/python3/dist-packages/modelopt/torch/export/quant_utils.py", line 210, in pack\n'
            '    raise ValueError("Weight shape is not divisible for block size for block quantization.")\n'
            "ValueError: Weight shape is not divisible for block size for block quantization.",
        },
    ),
    Excerpt(
        "int4-alignment",
        {
            0: BUILD,
            1: f"{PYTHON}\nRuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Number of bytes for rows and "
            "cols must "
            "be a multiple of 32. However, num_rows_bytes = 4096 and num_col_bytes = 2000. "
            "(/app/kernels/cutlass_kernels/cutlass_preprocessors.cpp:255)",
        },
        {"rows": "4096", "columns": "2000"},
        rank=1,
    ),
    Excerpt(
        "gptq-group",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:33] [TRT-LLM] [E] Current weight shape is invalid for mapping.tp_size=4\n"
            f"{PYTHON}\nAssertionError",
            1: BUILD,
        },
        {"tp": "4"},
    ),
    Excerpt(
        "export-failed",
        {
            0: "/usr/lib/modelopt/torch/export/unified_export_hf.py:545: UserWarning: Cannot export model to the "
            "model_config. The modelopt-optimized model state_dict can be saved with torch.save for further "
            "inspection.\n  warnings.warn(",
            1: LOADING,
        },
    ),
    Excerpt(
        "export-error",
        {
            0: "Unknown model type Starcoder2ForCausalLM. Continue exporting...\n"
            "Cannot export model to the model_config. The AMMO optimized model state_dict is saved to /out/ammo.0.pth\n"
            "Detailed export error: 'Starcoder2Config' object has no attribute 'rms_norm_eps'",
        },
        {"error": "'Starcoder2Config' object has no attribute 'rms_norm_eps'"},
    ),
    Excerpt(
        "rope-scaling",
        {
            0: f"{LOADING}\n{PYTHON}\nValueError: `rope_scaling` must be a dictionary with two fields, `type` and "
            "`factor`, got {'factor': 8.0, 'rope_type': 'llama3'}",
            1: LOADING,
        },
    ),
    Excerpt(
        "qwen-type",
        {
            0: f"{PYTHON}\nAssertionError: Unsupported Qwen type: qwen3, only ('qwen', 'qwen2', 'qwen2_moe') are "
            "acceptable."
        },
        {"model": "qwen3"},
    ),
    Excerpt("architecture-key", {0: f"{PYTHON}\nKeyError: 'gemma3'", 1: BUILD}, {"model": "gemma3"}, style="torch"),
    Excerpt(
        "architecture-unknown",
        {
            0: f"{PYTHON}\nNotImplementedError: The given huggingface model architecture GptOssForCausalLM is not "
            "supported in TRT-LLM yet",
            1: BUILD,
        },
        {"model": "GptOssForCausalLM"},
    ),
    Excerpt(
        "tokenizer-class",
        {
            0: f"{LOADING}\n"
            'E0711 12:00:05.000000 101 pb_stub.cc:402] "Failed to initialize Python stub: ValueError: Tokenizer class '
            'BaichuanTokenizer does not exist or is not currently imported.\\n\\nAt:\\n  tokenization_auto.py(748)"\n'
            'E0711 12:00:06.000000 101 backend_model.cc:692] "ERROR: Failed to create instance: Stub process '
            "'preprocessing_0_0' is not healthy.\"",
            1: LOADING,
        },
        {"class": "BaichuanTokenizer"},
    ),
    Excerpt(
        "tokenizer-backend",
        {
            0: f"{LOADING}\n"
            "E0711 12:00:05.000000 101 pb_stub.cc:402] \"Failed to initialize Python stub: ValueError: Couldn't "
            'instantiate the backend tokenizer from one of:"\n'
            "(1) a `tokenizers` library serialization file,",
            1: LOADING,
        },
    ),
    Excerpt(
        "dataset-config",
        {0: f"{PYTHON}\nValueError: Config name is missing.\nPlease pick one among: ['1.0.0', '3.0.0']"},
    ),
    Excerpt(
        "dataset-repository",
        {
            0: f"{PYTHON}\nhuggingface_hub.errors.HfUriError: Invalid HF URI 'hf://datasets/cnn_dailymail'. "
            "Repository id "
            "must be 'namespace/name', got 'cnn_dailymail'",
        },
        {"name": "cnn_dailymail"},
    ),
    Excerpt(
        "symbol-undefined",
        {
            0: "Traceback (most recent call last):\n"
            '  File "<string>", line 1, in <module>\n'
            "ImportError: /usr/lib/python3/dist-packages/tensorrt_llm/libs/libth_common.so: undefined symbol: "
            "_ZN5torch6detail10class_baseC2ERKSsS3_SsRKSt9type_infoS6_",
            1: LOADING,
        },
        {"symbol": "_ZN5torch6detail10class_baseC2ERKSsS3_SsRKSt9type_infoS6_"},
    ),
    Excerpt(
        "driver-too-old",
        {
            None: "=============================\n== Triton Inference Server ==\n=============================\n"
            "ERROR: This container was built for NVIDIA Driver Release 535.86 or later, but\n"
            "       version 510.85.02 was detected and compatibility mode is UNAVAILABLE.\n"
            "       [[Forward compatibility was attempted on non supported HW (CUDA_ERROR_COMPAT_NOT_SUPPORTED) "
            "cuInit()=804]]"
        },
        {"needed": "535.86", "found": "510.85.02"},
        rank=None,
    ),
    Excerpt(
        "docker-no-gpu",
        {None: 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'},
        rank=None,
    ),
    Excerpt(
        "docker-no-image",
        {
            None: "Unable to find image 'registry.example/mine:1' locally\ndocker: Error response from daemon: pull "
            "access denied for registry.example/mine, repository does not exist or may require 'docker login'."
        },
        {"image": "registry.example/mine"},
        rank=None,
    ),
    Excerpt(
        "docker-no-daemon",
        {
            None: "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon "
            "running?\nSee 'docker run --help'."
        },
        rank=None,
    ),
)

WARNINGS = (
    Excerpt(
        "engine-other-gpu-model",
        {
            0: f"{LOADING}\n[TensorRT-LLM][WARNING] Using an engine plan file across different models of devices "
            "is not "
            "recommended and is likely to affect performance or even cause errors.",
            1: LOADING,
        },
    ),
    Excerpt(
        "build-tactic-skipped",
        {
            0: f"{BUILD}\n[07/11/2024-12:00:38] [TRT] [W] UNSUPPORTED_STATESkipping tactic 4 due to insufficient "
            "memory on "
            "requested size of 66048 detected for tactic 0x000000000000001f.",
            1: BUILD,
        },
    ),
    Excerpt(
        "container-no-gpu",
        {
            0: "WARNING: The NVIDIA Driver was not detected.  GPU functionality will not be available.\n"
            "   Use the NVIDIA Container Toolkit to start this container with GPU support; see\n"
            "   https://docs.nvidia.com/datacenter/cloud-native/ .",
            1: LOADING,
        },
    ),
    Excerpt(
        "large-kv-activation",
        {
            0: "Warning: Large KV activation detected: 0.6927, Quantized KV cache may lead to higher accuracy drop.",
            1: "[07/11/2024-12:00:58] [TRT-LLM] [I] Calibrating batch 0",
        },
        {"amax": "0.6927"},
    ),
)

HARMLESS = {
    "parameter-left-out": "[TensorRT-LLM][WARNING] Parameter version cannot be read from json:\n"
    "[TensorRT-LLM][WARNING] [json.exception.out_of_range.403] key 'version' not found",
    "optional-value-left-out": "[TensorRT-LLM][WARNING] Optional value for parameter max_num_tokens will not be set.",
    "timing-cache": "[07/11/2024-12:00:38] [TRT] [W] Invalid timing cache, using freshly created one",
    "triton-without-gpu": 'E1120 19:23:06.212177 5166 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    "Error: Failed to initialize NVML",
    "pip-resolver": "ERROR: pip's dependency resolver does not currently take into account all the packages that are "
    "installed. This behaviour is the source of the following dependency conflicts.\n"
    "nvidia-modelopt 0.37.0 requires transformers<5.0, but you have transformers 5.0.0 which is incompatible.",
    "driver-insufficient": "W0316 07:48:38.533640 1 pinned_memory_manager.cc:273] Unable to allocate pinned system "
    "memory, pinned memory pool will not be available: CUDA driver version is insufficient for CUDA runtime version",
}
