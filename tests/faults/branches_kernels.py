"""Faults of kernels whose tasks add to gradients that others have written: documents that share rows."""

from faults.fault import Fault

EXACT = "tests/runtime/test_branches.py"
LISTS = "cuda/attention/work_list.cpp"
STRESS = "tests/attention/test_several_scores.py"
ORDER = "tests/attention/test_store_order.py"
KERNELS = "tests/cuda/test_kernels_on_host.py"
FLASH = "tests/cuda/test_flash_ranks.py"

FAULTS = [
    Fault(
        "branches: the CPU kernel writes where it should add",
        "cpp/attention/cpu_backward.cpp",
        "if (!run.is_added) {",
        "if (true) {",
        (EXACT,),
    ),
    Fault(
        "branches: groups of the CPU kernel add at the same time",
        "cpp/attention/cpu_attention.cpp",
        "wave = std::max(wave, waves[static_cast<size_t>(before)] + 1);",
        "",
        (STRESS,),
    ),
    Fault(
        "branches: CUDA: an item writes where it should add",
        "cuda/attention/row_parts.h",
        "if (run.is_added != 0)",
        "if (false)",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: an item adds before the one before it has written",
        "cuda/attention/hopper_consumer.h",
        "if (item.before_begin == item.before_end) return;",
        "return;",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: an item waits for one that comes later",
        LISTS,
        "list.costs[follows->second] = std::max(list.costs[follows->second], list.costs[follows->first]);",
        "",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: an item waits for the last of those that store before it alone",
        "cuda/attention/hopper_consumer.h",
        "for (int i = 2 * item.before_begin; i < 2 * item.before_end; ++i)",
        "for (int i = 2 * item.before_end - 2; i < 2 * item.before_end; ++i)",
        (KERNELS,),
    ),
    Fault(
        "branches: CUDA: a warpgroup waits for the same one of another item alone",
        "cuda/attention/hopper_consumer.h",
        "stored(p.before[i / 2]) + i % 2)",
        "stored(p.before[i / 2]) + warpgroup())",
        (KERNELS,),
    ),
    Fault(
        "branches: what is left of rows to which somebody stores is forgotten",
        "cpp/attention/store_order.h",
        "if (end < before.end) stores_[end] = before;",
        "",
        (ORDER,),
    ),
    Fault(
        "branches: rows before those to which somebody stores are forgotten",
        "cpp/attention/store_order.h",
        "if (there < begin) stores_[there] = {begin, before.number};",
        "",
        (ORDER,),
    ),
    Fault(
        "branches: who stores to a part of the rows is not waited for",
        "cpp/attention/store_order.h",
        "if (next != stores_.begin() && std::prev(next)->second.end > begin) --next;",
        "",
        (ORDER,),
    ),
    Fault(
        "branches: CUDA: groups that wait for no signal come before those that they add to",
        LISTS,
        "is_remote(item) |= is_remote(before);",
        "",
        (KERNELS,),
    ),
    Fault(
        "branches: ATen: a group writes where it should add",
        "cpp/torch/aten_backend.cpp",
        "run.is_added ? aten::add(place, aten::cast(rows, ScalarType::Float)) : rows",
        "rows",
        (FLASH,),
    ),
]
