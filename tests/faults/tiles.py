"""Faults of the CPU kernel's products on tiles, and of the choice of instruction sets that has them."""

from faults.fault import Fault

FORWARD = "cpp/attention/cpu_forward.cpp"
TILES = "cpp/attention/micro_tiles.h"
TILES_TEST = "tests/attention/test_tiles.py"
CPU_KERNELS = "tests/connect/test_cpu_kernels.py"
AGREEMENT = "tests/connect/test_agreement.py"
INIT = "python/distca/connect/init.py"
AGREED = "python/distca/connect/cpu_kernels.py"

FAULTS = [
    Fault(
        "the emulated dot instruction leaves out the first elements of pairs",
        "cpp/emulation/vector_instructions.h",
        "without_denormals(fmadd(first(left), first(right), sum));",
        "sum;",
        ("tests/attention/test_attention.py",),
    ),
    Fault(
        "the dot instruction's weights of two keys change places",
        "cpp/attention/micro_simd.h",
        "_mm512_cvtne2ps_pbh(second, first));",
        "_mm512_cvtne2ps_pbh(first, second));",
        (TILES_TEST,),
    ),
    Fault(
        "columns of values change places where they are packed for tiles",
        TILES,
        "return (c / 4 * 8 + c % 4) * kTileWords;",
        "return (c / 4 * 8 + (c + 1) % 4) * kTileWords;",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: keys that a row may not see are multiplied by zero",
        TILES,
        "const bool lane_by_lane = !unseen_values_are_finite(v);",
        "const bool lane_by_lane = false;",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: of the keys at the edge only the first block is looked through",
        TILES,
        "are_finite(larger_of(visible.upto[0], v.tile.begin), v.tile.end);",
        "are_finite(larger_of(visible.upto[0], v.tile.begin), v.tile.begin + kTileElements);",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: rows that do not see a key are multiplied by zero",
        TILES,
        "if (is_edge_block(m, visible, at) && !all_finite(",
        "if (!is_edge_block(m, visible, at) && !all_finite(",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: the two rows of a pair of values are swapped",
        TILES,
        "row_at(block + 2 * p, j) >> 16 | row_at(block + 2 * p + 1, j)",
        "row_at(block + 2 * p + 1, j) >> 16 | row_at(block + 2 * p, j)",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: the sums of a row are not multiplied when its base is raised",
        TILES,
        "  if (!sums.are_new && sums.rescale != nullptr) rescale_sums(tile.lanes, columns, sums.rescale, sums.data);\n",
        "",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: all rows are divided by the sums of the first 16",
        TILES,
        "broadcast(1.f) : load(divisor + lane);",
        "broadcast(1.f) : load(divisor);",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: both halves of a packed step take the values of the first",
        FORWARD,
        "buffers.scores, step.values, key,\n",
        "buffers.scores, step.values, 0 * key,\n",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: a part of a strip that softmax has not written is added",
        TILES,
        "return visible.from[key] < smaller_of(at.row + kBlock, visible.upto[key]);",
        "return true;",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: they are released although another library had configured them",
        "cpp/attention/micro_tile_blocks.h",
        "const bool was_configured = found.bytes[0] != std::byte{0};",
        "const bool was_configured = found.bytes[0] != found.bytes[0];",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: a worker uses them as it finds them",
        "cpp/attention/cpu_attention.cpp",
        "    const KernelThread thread(*call.micro);\n",
        "",
        (TILES_TEST,),
    ),
    Fault(
        "tiles: the emulated instruction keeps denormals",
        "cpp/emulation/tile_instructions.h",
        "set(0x9fc0);",
        "set(0x1f80);",
        (TILES_TEST,),
    ),
    Fault(
        "the dot instruction is taken on every CPU of a maker",
        "cpp/attention/cpu_model.cpp",
        "model.vendor == vendor && model.family == family",
        "model.vendor == vendor",
        (TILES_TEST,),
    ),
    Fault(
        "a rank runs its own instruction set over shm, and not the group's",
        INIT,
        "progress_thread=r.progress_thread, cpu_isa=r.cpu_isa)",
        "progress_thread=r.progress_thread)",
        (CPU_KERNELS,),
    ),
    Fault(
        "a rank runs its own instruction set over torch, and not the group's",
        INIT,
        "name=r.name, cpu_isa=r.cpu_isa,",
        "name=r.name,",
        (CPU_KERNELS,),
    ),
    Fault(
        "the core forgets the instruction set of a context",
        "cpp/runtime/backend.cpp",
        "CpuBackend(std::string_view isa) : kernel_(isa) {}",
        "CpuBackend(std::string_view) : kernel_() {}",
        (CPU_KERNELS,),
    ),
    Fault(
        "a group takes the instruction set of its first rank",
        AGREED,
        "if all(isa in kernels.up_to_choice for kernels in ranks)",
        "if all(kernels.usable for kernels in ranks)",
        (CPU_KERNELS,),
    ),
    Fault(
        "a group takes what its ranks can use and would not choose",
        AGREED,
        "return self.usable[self.usable.index(self.choice) :]",
        "return self.usable",
        (CPU_KERNELS,),
    ),
    Fault(
        "of two forced instruction sets the first is taken",
        AGREED,
        "if ranks[rank].choice != isa:",
        "if ranks[rank].choice == '':",
        (CPU_KERNELS, AGREEMENT),
    ),
    Fault(
        "an instruction set is forced on a rank that lacks it",
        AGREED,
        "if isa not in kernels.usable:",
        "if kernels.usable == ():",
        (CPU_KERNELS, AGREEMENT),
    ),
    Fault(
        "a rank does not know that its instruction set is forced",
        AGREED,
        'os.environ.get("DISTCA_CPU_ISA")',
        'os.environ.get("DISTCA_CPU")',
        (CPU_KERNELS,),
    ),
    Fault(
        "a rank says nothing of a weaker instruction set",
        INIT,
        "mine.cpu_kernels.choice != isa:",
        "mine.cpu_kernels.choice not in mine.cpu_kernels.usable:",
        (CPU_KERNELS,),
    ),
]
