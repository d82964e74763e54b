"""In the steady state the core allocates nothing, and the memory of a process does not grow.

The tests count every call of malloc and its relatives and of operator new, by any thread, whose caller lies in one of
our libraries. The caller is found by the return address. If that lies in libstdc++, whose functions allocate for those
that call them (strings, streams), the caller is the first one further up that does not. A library that is preloaded
into a process of its own sees all these calls.

`libdistca` may make no such call. `libdistca_torch` is the layer that LibTorch's stable ABI ends in: its headers hold
every tensor by a handle of their own, made with `new` when an argument is unpacked or a result packed. The tests assert
that these calls are few and small, whatever the plan. torch allocates the storage of the returned tensors.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COUNTER = r"""
#include <execinfo.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_calloc(size_t, size_t);
extern "C" void* __libc_realloc(void*, size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

struct Range { uintptr_t begin, end; int owner; };
constexpr int kTransparent = 2, kMaxPlaces = 64;
Range ranges[64];
int num_ranges = 0;
std::atomic<bool> on{false};
std::atomic<int64_t> calls[2], bytes[2], largest[2];
std::atomic<int> num_places{0};
uintptr_t places[kMaxPlaces];
thread_local bool inside = false;

int owner_of(uintptr_t address) {
  for (int i = 0; i < num_ranges; ++i)
    if (address >= ranges[i].begin && address < ranges[i].end) return ranges[i].owner;
  return -1;
}

void record(size_t size, void* caller) {
  if (!on.load(std::memory_order_relaxed) || inside) return;
  uintptr_t address = reinterpret_cast<uintptr_t>(caller);
  int owner = owner_of(address);
  if (owner == kTransparent) {
    inside = true;
    void* frames[24];
    const int n = backtrace(frames, 24);
    inside = false;
    int i = 0;
    while (i < n && owner_of(reinterpret_cast<uintptr_t>(frames[i])) != kTransparent) ++i;
    while (i < n && owner_of(reinterpret_cast<uintptr_t>(frames[i])) == kTransparent) ++i;
    if (i == n) return;
    address = reinterpret_cast<uintptr_t>(frames[i]);
    owner = owner_of(address);
  }
  if (owner < 0) return;
  ++calls[owner];
  bytes[owner] += static_cast<int64_t>(size);
  if (static_cast<int64_t>(size) > largest[owner]) largest[owner] = static_cast<int64_t>(size);
  const int place = num_places.fetch_add(1);
  if (place < kMaxPlaces) places[place] = address;
}

void* checked(void* p) {
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

extern "C" {
void counter_watch(uint64_t begin, uint64_t end, int owner) { ranges[num_ranges++] = {begin, end, owner}; }
void counter_switch(int value) {
  void* warm[4];
  backtrace(warm, 4);
  on = value != 0;
}
void counter_clear() {
  for (int owner = 0; owner < 2; ++owner) calls[owner] = bytes[owner] = largest[owner] = 0;
  num_places = 0;
}
int64_t counter_calls(int owner) { return calls[owner]; }
int64_t counter_bytes(int owner) { return bytes[owner]; }
int64_t counter_largest(int owner) { return largest[owner]; }
uint64_t counter_place(int i) { return i < num_places && i < kMaxPlaces ? places[i] : 0; }

#define CALLER __builtin_return_address(0)
void* malloc(size_t n) { record(n, CALLER); return __libc_malloc(n); }
void* calloc(size_t m, size_t n) { record(m * n, CALLER); return __libc_calloc(m, n); }
void* realloc(void* p, size_t n) { record(n, CALLER); return __libc_realloc(p, n); }
void* aligned_alloc(size_t a, size_t n) { record(n, CALLER); return __libc_memalign(a, n); }
void* memalign(size_t a, size_t n) { record(n, CALLER); return __libc_memalign(a, n); }
int posix_memalign(void** p, size_t a, size_t n) {
  record(n, CALLER);
  *p = __libc_memalign(a, n);
  return *p == nullptr ? ENOMEM : 0;
}
}

#define NEW(...) void* operator new(__VA_ARGS__)
#define NEW_ARRAY(...) void* operator new[](__VA_ARGS__)
NEW(size_t n) { record(n, CALLER); return checked(__libc_malloc(n)); }
NEW_ARRAY(size_t n) { record(n, CALLER); return checked(__libc_malloc(n)); }
NEW(size_t n, const std::nothrow_t&) noexcept { record(n, CALLER); return __libc_malloc(n); }
NEW_ARRAY(size_t n, const std::nothrow_t&) noexcept { record(n, CALLER); return __libc_malloc(n); }
NEW(size_t n, std::align_val_t a) { record(n, CALLER); return checked(__libc_memalign(size_t(a), n)); }
NEW_ARRAY(size_t n, std::align_val_t a) { record(n, CALLER); return checked(__libc_memalign(size_t(a), n)); }
NEW(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  record(n, CALLER);
  return __libc_memalign(size_t(a), n);
}
NEW_ARRAY(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  record(n, CALLER);
  return __libc_memalign(size_t(a), n);
}
"""

PROGRAM = r"""
import ctypes, json, sys, threading
from pathlib import Path
import torch, distca

RANKS = int(sys.argv[1])
STEPS = {"whole": int(sys.argv[2]), "in parts": int(sys.argv[3])}  # forward and backward are one each
LAYERS = 5
CORE, OPERATORS, TRANSPARENT = 0, 1, 2
LIBRARIES = {"libdistca.so": CORE, "libdistca_torch.so": OPERATORS, "libstdc++.so.6": TRANSPARENT}

counter = ctypes.CDLL(None)
counter.counter_watch.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
for name in ("calls", "bytes", "largest"):
    getattr(counter, f"counter_{name}").restype = ctypes.c_int64
counter.counter_place.restype = ctypes.c_uint64
base = {}
for line in Path("/proc/self/maps").read_text().splitlines():
    span, mode, offset, *_, path = line.split(maxsplit=5)
    name = Path(path).name if path.startswith("/") else ""
    for library, owner in LIBRARIES.items():
        if name.startswith(library):
            begin, end = (int(x, 16) for x in span.split("-"))
            base[library] = (base.get(library, (begin, end))[0], end)
            if "x" in mode:
                counter.counter_watch(begin, end, owner)

torch.set_num_threads(2 if RANKS == 1 else 1)
heads = distca.Heads(q=4, kv=2, dim=24, v_dim=16)
room = 240
documents = [[1, 150, 70], [200, 5, 13], [37] * 6, [100, 100, 20], [3, 2, 1, 210]]
plans = [
    distca.plan(distca.Layout.packed([n * RANKS for n in lengths], ranks=RANKS, tokens_per_rank=room), heads, rank=0,
                tolerance=0.0, min_rows=1, balance=balance)
    for lengths in documents for balance in (True, False)
]
heap = 2 * max(plan.stats.slot_bytes for plan in plans) + 8192
contexts = distca.loopback(RANKS, max_tokens=room, heads=heads, heap_bytes=heap, timeout=60)
gate = threading.Barrier(RANKS)

def rss():
    # A system that is short of memory takes pages of files too, and gives them back.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

class Layers(torch.nn.Module):
    def forward(self, q, k, v, plan, context):
        for _ in range(LAYERS):
            out, _ = distca.core_attention(q, k, v, plan, context=context)
            q = q + out.mean(-1, keepdim=True)
        return out

both = distca.PingPong(Layers())

def work(rank, report):
    mine = [plan.for_rank(rank) for plan in plans]
    data = []
    for plan in mine:
        rows = plan.num_rows
        q, k, v = (torch.randn(rows, h, d, requires_grad=True) for h, d in ((4, 24), (2, 24), (2, 16)))
        data.append((plan, q, k, v, torch.randn(rows, 4, 16)))

    def clear(of):
        for tensor in of[1:4]:
            tensor.grad = None

    def whole(steps):
        for i in range(steps // 2):
            plan, q, k, v, dout = of = data[(7 * i) % len(data)]
            out, _ = distca.core_attention(q, k, v, plan, context=contexts[rank].name)
            out.backward(dout)
            clear(of)

    def in_parts(steps):
        for i in range(steps // (4 * LAYERS)):
            halves = [data[(7 * i) % len(data)], data[(3 * i + 1) % len(data)]]
            outs = both(*((q, k, v, plan, contexts[rank].name) for plan, q, k, v, _ in halves))
            torch.autograd.backward(outs, [half[4] for half in halves])
            [clear(half) for half in halves]

    for name, run in (("whole", whole), ("in parts", in_parts)):
        run(len(data) * 2 * LAYERS)
        gate.wait()
        if rank == 0:
            before, begun = rss(), contexts[0].step
            counter.counter_switch(1)
        gate.wait()
        run(STEPS[name])
        gate.wait()
        if rank == 0:
            counter.counter_switch(0)
            report[name] = counted() | {"grown": rss() - before, "steps": contexts[0].step - begun}
        # If it grew, run once more: the system may have taken pages before, but a leak grows again.
        for _ in range(2):
            gate.wait()
            if report[name]["grown"] < 2048:
                break
            before = rss()
            run(STEPS[name])
            gate.wait()
            if rank == 0:
                report[name]["grown"] = min(report[name]["grown"], rss() - before)
        gate.wait()

def counted():
    # since the call before
    found = {}
    for name, owner in (("core", CORE), ("operators", OPERATORS)):
        found[name] = {key: getattr(counter, f"counter_{key}")(owner) for key in ("calls", "bytes", "largest")}
    places = [counter.counter_place(i) for i in range(64)]
    found["places"] = sorted({
        f"{library}+{address - begin:#x}" for address in places if address
        for library, (begin, end) in base.items() if begin <= address < end
    })
    counter.counter_clear()
    return found

report = {}
threads = [threading.Thread(target=work, args=(rank, report)) for rank in range(RANKS)]
[t.start() for t in threads]
[t.join() for t in threads]

# This shows that the counter counts: the core makes a plan, which takes memory.
counter.counter_switch(1)
distca.plan(plans[0].layout, heads, rank=0)
counter.counter_switch(0)
report["making a plan"] = counter.counter_calls(CORE)
print(json.dumps(report))
"""

STEPS = {"whole": 300, "in parts": 1000}


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler to build the counter of allocations with")
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the counter of allocations needs glibc")
    folder = tmp_path_factory.mktemp("counter")
    source, library = folder / "counter.cpp", folder / "libcounter.so"
    source.write_text(COUNTER)
    subprocess.run([compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", source, "-o", library], check=True)
    return library


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def steady_state(request: pytest.FixtureRequest, counter: Path) -> dict:
    """The allocations that a process counts in STEPS steps over a set of plans that it has seen before; some steps are
    under way together.
    """
    pytest.importorskip("greenlet")
    environment = {**os.environ, "LD_PRELOAD": str(counter)}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *map(str, (request.param, *STEPS.values()))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    print(report)
    return report | {"ranks": request.param}


@pytest.fixture(params=list(STEPS))
def counted(request: pytest.FixtureRequest, steady_state: dict) -> dict:
    """The counts of whole steps, and those of steps in parts, two of which are always under way in ping-pong."""
    found = steady_state[request.param]
    assert found["steps"] == STEPS[request.param]
    return found | {"ranks": steady_state["ranks"]}


def test_the_counter_sees_allocations_of_the_core(steady_state: dict) -> None:
    assert steady_state["making a plan"] > 10


def test_the_core_allocates_nothing_in_the_steady_state(counted: dict) -> None:
    assert counted["core"]["calls"] == 0, counted["places"]


def test_the_operators_allocate_only_the_handles_of_their_tensors(counted: dict) -> None:
    operators = counted["operators"]
    assert operators["largest"] <= 64, counted["places"]
    assert operators["calls"] / (counted["steps"] * counted["ranks"]) <= 15, counted["places"]


def test_resident_memory_does_not_grow_over_steps_of_changing_plans(counted: dict) -> None:
    assert counted["grown"] < 2048, f"{counted['grown']} KB in {counted['steps']} steps"
