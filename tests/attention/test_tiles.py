"""The CPU kernel's products of bf16 on tiles (AMX), emulated where there are none, and by the dot instruction."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import distca
from support.batches import random_batch
from support.local_tasks import whole_documents
from support.ranks import launch

ROOT = Path(__file__).resolve().parents[2]
#: Emulated instructions are slow: of the tests of softcap and sinks they run those whose head dimension is not 64.
WITH_FEW = "and not (softcap_and_sinks and 64)"
FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mno-avx512f", "-DDISTCA_EMULATED_VECTORS"]
MULTIPLY = r"""
#include "emulation/vector_instructions.h"

#include "emulation/tile_instructions.h"

#include <cstdio>

namespace distca::attention {

int multiply() {
  if (!__builtin_cpu_supports("avx2")) return 77;
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 3; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
  uint32_t tiles[3][16][16];
  if (std::fread(tiles, sizeof(tiles), 1, stdin) != 1) return 1;
  _tile_loadconfig(config);
  for (int tile = 0; tile < 3; ++tile) _tile_loadd(tile, tiles[tile], 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, tiles[0], 64);
  return std::fwrite(tiles[0], sizeof(tiles[0]), 1, stdout) == 1 ? 0 : 1;
}

}  // namespace distca::attention

int main() { return distca::attention::multiply(); }
"""
CONFIGURATION = r"""
#define DISTCA_ISA amx_emulated
#define DISTCA_EMULATED_TILES
#include "attention/micro_kernel.cpp"

#include <cstring>

namespace distca::attention {

static bool is_configured_like(const void* expected) {
  FoundState now;
  _tile_storeconfig(&now);
  return std::memcmp(&now, expected, sizeof(now)) == 0;
}

int configure() {
  if (!__builtin_cpu_supports("avx2")) return 77;
  const MicroKernel& tiles = *kInstructionSet_amx_emulated.pairs;
  const FoundState nothing{};
  {
    const KernelThread thread(tiles);
    if (!is_configured_like(&kTileConfig)) return 1;
  }
  if (!is_configured_like(&nothing)) return 2;
  TileConfig of_another = kTileConfig;
  of_another.row_bytes[0] = 32;
  of_another.rows[3] = 5;
  _tile_loadconfig(&of_another);
  {
    const KernelThread thread(tiles);
    if (!is_configured_like(&kTileConfig)) return 3;
  }
  if (!is_configured_like(&of_another)) return 4;
  const KernelThread floats(*kInstructionSet_amx_emulated.floats);
  return is_configured_like(&of_another) ? 0 : 5;
}

}  // namespace distca::attention

int main() { return distca::attention::configure(); }
"""


MODELS = r"""
#include "attention/cpu_model.h"

int main() {
  using distca::attention::dot_is_faster;
  const bool fast = dot_is_faster("AuthenticAMD", 0x19) && dot_is_faster("AuthenticAMD", 0x1a);
  const bool slow = dot_is_faster("GenuineIntel", 6) || dot_is_faster("AuthenticAMD", 0x17) ||
                    dot_is_faster("GenuineIntel", 0x19) || dot_is_faster("", 0);
  return fast && !slow ? 0 : 1;
}
"""


def compiled(code: str, folder: Path, others: Sequence[str] = ()) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None or os.uname().machine != "x86_64":
        pytest.skip("needs a compiler for x86-64")
    source, program = folder / "tiles.cpp", folder / "tiles"
    source.write_text(code)
    others = [str(ROOT / "cpp" / file) for file in others]
    flags = ["-std=c++20", "-O0", "-ffp-contract=off", "-w", f"-I{ROOT / 'cpp'}", *FLAGS]
    subprocess.run([compiler, *flags, str(source), *others, "-o", str(program)], check=True)
    return program


def run(program: Path, data: bytes = b"") -> bytes:
    ran = subprocess.run([program], input=data, capture_output=True)
    if ran.returncode == 77:
        pytest.skip("this CPU has no AVX2")
    assert ran.returncode == 0
    return ran.stdout


def exact(bits: int) -> Fraction:
    """The value of the bits of a float; a denormal is zero."""
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    assert exponent < 255
    if exponent == 0:
        return Fraction(0)
    return (-1) ** (bits >> 31) * Fraction(2**23 + fraction) * Fraction(2) ** (exponent - 150)


def rounded(x: Fraction) -> Fraction:
    """The nearest number of 24 bits, of two equally near ones the even one; zero below the smallest normal float."""
    if x == 0:
        return x
    numerator, denominator = abs(x).as_integer_ratio()  # the latter is a power of two
    power = numerator.bit_length() - 24
    whole = round(Fraction(numerator) / Fraction(2) ** power) * Fraction(2) ** power / denominator  # halves to even
    assert whole < Fraction(2) ** 128
    return Fraction(0) if whole < Fraction(2) ** -126 else whole * (1 if x > 0 else -1)


def multiplied(sums: list[list[int]], left: list[list[int]], right: list[list[int]], m: int, n: int) -> Fraction:
    """An element of TDPBF16PS by Intel's manual: two chains, of first and of second elements, then their sum."""
    chains = [Fraction(0), Fraction(0)]
    for k in range(16):
        for half in (0, 1):
            a, b = (word << 16 & 0xFFFFFFFF if half == 0 else word & 0xFFFF0000 for word in (left[m][k], right[k][n]))
            chains[half] = rounded(chains[half] + exact(a) * exact(b))
    return rounded(exact(sums[m][n]) + rounded(chains[0] + chains[1]))


def test_an_emulated_tile_product_is_the_manuals_to_the_last_bit(tmp_path: Path) -> None:
    program = compiled(MULTIPLY, tmp_path)
    generator = random.Random(1)
    for low, high in ((120, 134), (0, 40), (55, 75), (0, 130)):  # exponents; small ones give denormals

        def half(low: int = low, high: int = high) -> int:
            return generator.getrandbits(1) << 15 | generator.randint(low, high) << 7 | generator.getrandbits(7)

        left, right = ([[half() << 16 | half() for _ in range(16)] for _ in range(16)] for _ in range(2))
        sums = [[half() << 16 | generator.getrandbits(16) for _ in range(16)] for _ in range(16)]
        data = b"".join(struct.pack("<256I", *[word for row in tile for word in row]) for tile in (sums, left, right))
        found = struct.unpack("<256I", run(program, data))
        for m in range(16):
            for n in range(16):
                bits = found[16 * m + n]
                assert bits & 0x7F800000 or not bits & 0x7FFFFF, "a denormal is left"
                assert exact(bits) == multiplied(sums, left, right, m, n), (low, high, m, n)


def test_tiles_are_left_as_they_were_found(tmp_path: Path) -> None:
    run(compiled(CONFIGURATION, tmp_path))


def test_bf16_takes_the_dot_instruction_only_where_it_is_faster_than_fp32(tmp_path: Path) -> None:
    run(compiled(MODELS, tmp_path, ["attention/cpu_model.cpp"]))


def _bits(dtype: torch.dtype) -> str:
    try:
        distca._C.cpu_operands(0)
    except distca.InvalidArgumentError as error:
        return str(error)
    digest = hashlib.sha256()
    for shape in [(8, 2, 64, 64), (5, 5, 24, 40), (2, 1, 256, 16)]:
        batch = random_batch((33, 700, 5, 129), distca.Heads(*shape, dtype=dtype), 1)
        batch.v[40] = math.nan
        q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
        out, lse = distca.attention(q, k, v, whole_documents(batch.lengths))
        out.backward(batch.dout)
        for t in (out, lse, q.grad, k.grad, v.grad):
            digest.update(t.detach().float().nan_to_num(1e30).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("isa", "emulated", "dtype"),
    [
        ("amx", "amx_emulated", torch.bfloat16),
        ("avx512", "avx512_bf16_emulated", torch.float32),
        ("avx512", "avx512_bf16_emulated", torch.float16),
    ],
)
def test_emulated_instructions_give_the_bits_of_the_real_ones(
    isa: str, emulated: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for name in (isa, emulated):
        monkeypatch.setenv("DISTCA_CPU_ISA", name)
        [found[name]] = launch(_bits, dtype, ranks=1)
        if found[name].startswith("environment variable"):
            pytest.skip(found[name])
    assert found[isa] == found[emulated]


def _outcome_of_tests(operands: str, names: Sequence[str], chosen: str) -> tuple[int, str]:
    """The exit code of pytest, and what it says; or the reason why this process has not the instruction set."""
    try:
        found = distca._C.cpu_operands(1)
    except distca.InvalidArgumentError as error:
        return -1, str(error)
    if found != operands:
        return 1, f"products of bf16 on {found}"
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    # conftest.py would start a server for forks, which these tests do not need.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-k", chosen]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*options, *files])
    return code, said.getvalue()


def run_tests_of_bf16(
    isa: str, operands: str, names: Sequence[str], monkeypatch: pytest.MonkeyPatch, chosen: str = ""
) -> None:
    """Runs the tests of bf16 in a process that is told its instruction set."""
    monkeypatch.setenv("DISTCA_CPU_ISA", isa)
    # The other test runs processes of its own for instruction sets.
    chosen = f"(bf16 or bfloat16) and not every_instruction_set {chosen}"
    [(code, said)] = launch(_outcome_of_tests, operands, names, chosen, ranks=1)
    if code == -1:
        pytest.skip(said)
    assert code == 0 and " passed" in said, said


def test_tests_of_bf16_pass_on_emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    run_tests_of_bf16("amx_emulated", "tiles", ["attention", "attention_features", "nan"], monkeypatch, WITH_FEW)


def test_tests_of_bf16_pass_with_the_dot_instruction_where_it_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    if distca._C.cpu_operands(distca.Heads(1, 1, 8, dtype=torch.bfloat16).dtype_number) == "pairs":
        pytest.skip("the dot instruction is what this process has chosen: the tests of bf16 run with it as they are")
    names = ["attention_features", "nan"]
    if "avx512_bf16" in distca._C.cpu_isas():
        run_tests_of_bf16("avx512_bf16", "pairs", names, monkeypatch)
    else:
        run_tests_of_bf16("avx512_bf16_emulated", "pairs", names, monkeypatch, WITH_FEW)
