"""``radixkv plan``: how many requests of a model fit a GPU's memory, and how long they may be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError
from radixkv.settings.arguments import Parser, byte_size, count, number
from radixkv.settings.checks import MAX_LORA_RANK
from radixkv.settings.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig
from radixkv.terminal import Progress, wrapped

if TYPE_CHECKING:
    from radixkv.checkpoints import Checkpoint
    from radixkv.lab.planner.plan import RequestShape
    from radixkv.lab.simulator.recording import Recording
    from radixkv.runtime.device.cuda.model_size import ModelSize

PROMPT, ANSWER = 2000, 300
WORKSPACE = "3GiB"
_HOST_GPUS = (2, 4, 8)
"""Usual numbers of GPUs in a host."""

EXAMPLES = """\
examples:
  radixkv plan meta-llama/Llama-3.1-8B --gpu-memory 80GB --prompt 2000 --answer 300 --shared 1500
  radixkv plan ./my-model/config.json --gpu-memory 24GiB --quantization fp8 --rows 8
  radixkv plan meta-llama/Llama-3.1-70B --gpu-memory 80GB --gpus 4
  radixkv plan ./my-model --gpu-memory 80GB --host-memory 256GiB --trace mooncake.jsonl
"""


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command, with ``summary`` as its help."""
    parser = commands.add_parser(
        "plan",
        help=summary,
        description="Compute weights, KV pool, rows at once and longest context of a model on a GPU, by how\n"
        "memory is reserved and by the type of K and V. It needs no GPU, and of the model only config.json.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model and memory")
    model.add_argument(
        "model", metavar="MODEL", help="a folder, a config.json, a hub name, or 'tiny' for the embedded model"
    )
    model.add_argument(
        "--gpu-memory",
        type=byte_size,
        required=True,
        metavar="SIZE",
        help="the GPU's memory; 80GB is 80,000,000,000 bytes, and 80GiB is 80 x 2**30",
    )
    model.add_argument(
        "--gpus",
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        "-tp",
        dest="tensor_parallel_size",
        type=count,
        default=1,
        metavar="COUNT",
        help="equal GPUs among which the model is divided, each with that memory (default: %(default)s)",
    )
    model.add_argument(
        "--gpu-memory-utilization",
        type=number,
        metavar="SHARE",
        help="share of the GPU's memory for weights, pool and workspace (default: 0.9)",
    )
    model.add_argument(
        "--workspace",
        type=byte_size,
        default=WORKSPACE,
        metavar="SIZE",
        help="memory for the driver, the largest step and CUDA graphs, which a server measures "
        "(default: %(default)s)",
    )
    model.add_argument(
        "--host-memory", type=byte_size, metavar="SIZE", help="size of a host tier for KV (default: none)"
    )
    model.add_argument(
        "--state-memory",
        "--state-memory-bytes",
        type=byte_size,
        metavar="SIZE",
        help="memory for the states of recurrent layers that the prefix cache keeps (default: a fifth of what the "
        "weights leave)",
    )
    model.add_argument("--quantization", "-q", metavar="FORMAT", help="fp8 counts weights rounded to FP8")
    model.add_argument(
        "--max-model-len",
        type=count,
        metavar="TOKENS",
        help="maximum length of a prompt plus its answer, in tokens (default: the checkpoint's)",
    )
    model.add_argument(
        "--page-size", "--block-size", type=count, default=16, metavar="TOKENS", help="default: %(default)s"
    )
    model.add_argument(
        "--max-loras",
        type=count,
        metavar="COUNT",
        help="LoRA adapters for which each GPU has slots (default: none)",
    )
    model.add_argument(
        "--max-lora-rank",
        type=count,
        default=16,
        metavar="RANK",
        help="highest rank of an adapter (default: %(default)s)",
    )
    model.add_argument(
        "--max-cpu-loras",
        type=count,
        metavar="COUNT",
        help="with --max-loras: LoRA adapters in host memory (default: 64, or --max-loras if that is more)",
    )
    model.add_argument(
        "--kv-eviction",
        metavar="METHOD",
        default="none",
        help="paged: also say how many rows fit with --kv-budget (default: none)",
    )
    model.add_argument(
        "--kv-budget",
        type=count,
        metavar="TOKENS",
        help="most tokens that a step of an answer reads (default: all)",
    )
    traffic = parser.add_argument_group("requests")
    traffic.add_argument("--prompt", type=count, metavar="TOKENS", help=f"length of a prompt (default: {PROMPT})")
    traffic.add_argument("--answer", type=count, metavar="TOKENS", help=f"length of an answer (default: {ANSWER})")
    traffic.add_argument(
        "--shared",
        type=count,
        metavar="TOKENS",
        help="leading tokens that all prompts have in common (default: 0)",
    )
    traffic.add_argument(
        "--rows",
        type=count,
        default=1,
        metavar="COUNT",
        help="rows at once for which the longest context is computed (default: 1)",
    )
    traffic.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="take the mean lengths and the common prefix of recorded requests instead, and estimate their hit "
        "rate; the files of 'radixkv simulate'",
    )
    traffic.add_argument("--tokenizer", metavar="MODEL", help="tokenizer of a trace with texts")
    parser.add_argument(
        "--output-file", type=Path, metavar="FILE", help="append the plan as a JSON line to this file"
    )
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; returns the exit code."""
    _check_flags(args)
    from radixkv.lab.bench.output import check_outputs, open_saver
    from radixkv.lab.planner.plan import Gpu, HostAdapters, StatePlan, check_budget, check_fits, plan_pool
    from radixkv.lab.planner.report import (
        LABEL_WIDTH,
        adapter_lines,
        hit_rate_lines,
        model_lines,
        pool_lines,
        remarks,
        request_line,
        scheme_table,
    )
    from radixkv.lab.simulator.caches import Capacity
    from radixkv.lab.simulator.simulation import Simulation
    from radixkv.runtime.device.adapters.cuda.memory_size import file_bytes, memory_bytes
    from radixkv.runtime.device.cuda.model_size import model_size
    from radixkv.runtime.device.machine import check_page_size
    from radixkv.runtime.device.resolved_config import GPU_MEMORY_UTILIZATION, StateRoom, with_defaults

    check_page_size(args.page_size)
    check_outputs(args.output_file, None)
    checkpoint = _checkpoint(args.model)
    limit = checkpoint.max_position_embeddings
    config, n_gpus, room = _engine_config(args), args.tensor_parallel_size, None
    size = model_size(checkpoint, args.quantization, n_gpus)
    adapter_bytes = 0
    if args.max_loras is not None:
        adapter_bytes = memory_bytes(size.config, args.max_loras, args.max_lora_rank, size.dtype)
    if size.state_bytes:
        utilization = config.cache.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        free_bytes = Gpu(args.gpu_memory, utilization, args.workspace).usable_bytes - size.weight_bytes
        room = StateRoom(size.state_bytes, max(0, free_bytes))
    elif args.state_memory is not None:
        raise ConfigError(
            f"--state-memory is {args.state_memory} bytes, and {checkpoint.folder.name} has no recurrent layers; "
            "leave it out"
        )
    resolved = with_defaults(config, "cuda", limit, has_states=room is not None, room=room)
    settings = resolved.device_settings
    if settings.max_model_len > limit:
        raise ConfigError(f"max_model_len {settings.max_model_len} must be between 1 and the checkpoint's {limit}")
    host_adapters = HostAdapters(0, 0, n_gpus)
    if args.max_loras is not None:
        whole = model_size(checkpoint, args.quantization)
        n_adapters = args.max_cpu_loras or max(resolved.max_adapters or 0, args.max_loras)
        each = file_bytes(whole.config, args.max_lora_rank, whole.dtype)
        host_adapters = HostAdapters(n_adapters, each, n_gpus)
    recording, request = _requests(args, settings.max_model_len)
    gpu = Gpu(args.gpu_memory, settings.gpu_memory_utilization, args.workspace, adapter_bytes)
    in_fp8 = None if size.n_quantized_values else model_size(checkpoint, "fp8", n_gpus)
    states = StatePlan.of(size, settings)
    check_fits(size, in_fp8, _divided(checkpoint, args.quantization, n_gpus), gpu, args.page_size, request, states)
    if args.kv_budget is not None:
        check_budget(size, settings.max_model_len)
    pools = [
        plan_pool(
            size,
            gpu,
            request,
            kv_cache_dtype=kv_cache_dtype,
            page_size=args.page_size,
            max_model_len=settings.max_model_len,
            n_rows=args.rows,
            host_bytes=resolved.config.cache.host_memory_bytes,
            states=states,
            kv_budget=args.kv_budget,
        )
        for kv_cache_dtype in ("auto", "fp8")
    ]
    capacities = [Capacity(pool.n_tokens, pool.n_host_tokens) for pool in pools]
    results = [] if recording is None else list(Simulation(recording, capacities, ("lru",), show_progress=True))
    record = {
        "model": checkpoint.name,
        "architecture": size.config.architecture,
        "n_values": size.n_values,
        "weight_bytes": size.weight_bytes,
        "states": states._asdict(),
        "quantization": args.quantization,
        "tensor_parallel_size": n_gpus,
        "page_size": args.page_size,
        "gpu_memory_bytes": gpu.n_bytes,
        "gpu_memory_utilization": gpu.utilization,
        "workspace_bytes": gpu.workspace_bytes,
        "adapter_bytes": gpu.adapter_bytes,
        "host_memory_bytes": args.host_memory,
        "host_adapter_bytes": host_adapters.n_bytes,
        "request": request._asdict(),
        "rows": args.rows,
        "pools": pools,
        "hit_rates": results,
    }
    open_saver(args.output_file, "plan")([record])
    name = checkpoint.folder.name if args.model != "tiny" else "tiny"
    lines = [*model_lines(name, size, settings.max_model_len, states)]
    if adapter_bytes:
        lines += adapter_lines(args.max_loras, args.max_lora_rank, adapter_bytes, host_adapters, size.dtype_name)
    lines.append(request_line(request, args.page_size))
    for pool in pools:
        lines += ["", *pool_lines(pool, size, gpu, request, args.page_size, states)]
        print(wrapped("\n".join(lines), LABEL_WIDTH))
        print(scheme_table(pool, request, args.page_size, settings.max_model_len, args.rows))
        lines = []
    print(wrapped("\n".join(["", *hit_rate_lines(results, pools)]) if results else "", LABEL_WIDTH))
    print(wrapped("\n".join(remarks(pools, settings.max_num_seqs, settings.max_model_len, request))))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    parser: Parser = args.parser
    minima = {"gpu_memory": 1, "prompt": 1, "answer": 1, "shared": 0, "rows": 1, "max_loras": 1, "max_lora_rank": 1}
    minima |= {"max_cpu_loras": 1}
    for name, minimum in minima.items():
        value = vars(args)[name]
        if value is not None and value < minimum:
            parser.error(f"{name} {value} must be at least {minimum}")
    if args.max_lora_rank > MAX_LORA_RANK:
        parser.error(f"max_lora_rank {args.max_lora_rank} must be at most {MAX_LORA_RANK}")
    if args.max_cpu_loras is not None and args.max_loras is None:
        parser.error(f"--max-cpu-loras {args.max_cpu_loras} is for a server with slots; give --max-loras, too")
    if args.trace is not None:
        for name in ("prompt", "shared"):
            if vars(args)[name] is not None:
                parser.error(f"--{name} and --trace both say how long prompts are; give one of them")
        return
    if args.tokenizer is not None:
        parser.error("--tokenizer is for a trace with texts; give --trace, or leave it out")
    args.prompt = PROMPT if args.prompt is None else args.prompt
    args.answer = ANSWER if args.answer is None else args.answer
    if (args.shared or 0) > args.prompt:
        parser.error(
            f"the shared prefix of {args.shared} tokens is longer than the prompt of {args.prompt}; set --shared "
            "lower, or --prompt higher"
        )


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    parser: Parser = args.parser
    try:
        return EngineConfig(
            ModelConfig(
                model=args.model,
                max_model_len=args.max_model_len,
                quantization=args.quantization,
                tensor_parallel_size=args.tensor_parallel_size,
            ),
            CacheConfig(
                page_size=args.page_size,
                gpu_memory_utilization=args.gpu_memory_utilization,
                host_memory_bytes=args.host_memory,
                state_memory_bytes=args.state_memory,
                kv_eviction=args.kv_eviction,
                kv_budget=args.kv_budget,
            ),
            adapters=AdapterConfig(
                max_loras=args.max_loras, max_lora_rank=args.max_lora_rank, max_cpu_loras=args.max_cpu_loras
            ),
        )
    except ConfigError as error:
        parser.error(str(error))


def _checkpoint(model: str) -> Checkpoint:
    """Returns the checkpoint that a folder, a hub name or the path of a ``config.json`` names."""
    from radixkv.checkpoints import resolve

    path = Path(model)
    return resolve(
        str(path.parent) if path.name == "config.json" and path.is_file() else model, load_format="dummy"
    )


def _divided(checkpoint: Checkpoint, quantization: str | None, n_gpus: int) -> Iterator[ModelSize]:
    """Yields the sizes of the model divided among more GPUs of a host, where it can be."""
    from radixkv.runtime.device.cuda.model_size import model_size

    for n_more in _HOST_GPUS:
        if n_more > n_gpus:
            try:
                size = model_size(checkpoint, quantization, n_more)
            except ConfigError:
                continue
            yield size


def _requests(args: argparse.Namespace, max_model_len: int) -> tuple[Recording | None, RequestShape]:
    """Returns the recording, if there is one, and the typical request.

    Raises:
        ConfigError: the request is too long, or the recording cannot be used.
    """
    from radixkv.lab.planner.plan import RequestShape, typical_request

    if args.trace is None:
        recording = None
        request = RequestShape(args.prompt, args.answer, args.shared or 0)
    else:
        from radixkv.lab.simulator.recording import read_recording

        with Progress(f"reading {args.trace}"):
            recording = read_recording(
                args.trace, page_size=args.page_size, rule="engine", tokenizer=args.tokenizer
            )
        request = typical_request(recording, args.answer)
    if request.prompt + request.answer > max_model_len:
        raise ConfigError(
            f"a prompt of {request.prompt} tokens and an answer of {request.answer} are longer than max_model_len "
            f"{max_model_len}; set --prompt or --answer lower"
        )
    return recording, request
