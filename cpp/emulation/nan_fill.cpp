#include "emulation/nan_fill.h"

namespace distca::emulation {
namespace {

using runtime::Backend;
using runtime::Dispatcher;

void fill_bytes(Backend& backend, std::byte* data, int64_t bytes) {
  backend.fill({data, bytes, bytes}, {1, 1, bytes}, runtime::Fill::kNan);
}

void fill_returned(Backend& backend, const Dispatcher::Step& step) {
  const plan::Header& h = step.slice.header();
  for (const plan::TensorKind kind : step.returned())
    backend.fill(step.local(kind), step.extent(plan::Direction::kOut, kind, step.all_heads(), h.num_rows),
                 runtime::Fill::kNan);
  if (step.phase == plan::Phase::kForward && step.retained != nullptr)
    fill_bytes(backend, step.retained, h.retained_bytes);
}

}  // namespace

void fill_with_nan(runtime::Context& context) {
  Backend& backend = context.backend();
  const int64_t arena_bytes = context.arena_bytes();
  const std::span<std::byte> heap = context.transport().heap();
  for (int64_t slot = 0; slot < runtime::kNumSlots; ++slot)
    fill_bytes(backend, heap.data() + slot * arena_bytes, arena_bytes);
  context.transport().quiet();
  // Results may leave the arena after the end of a step. Where steps are queued, the arena is therefore filled when the
  // next one begins. Elsewhere peers may write by then.
  transport::Transport& transport = context.transport();
  transport::StreamOrder* const streams = transport.stream_order();
  context.set_hooks({.begun =
                         [&backend, arena_bytes, streams](const Dispatcher::Step& step) {
                           fill_returned(backend, step);
                           if (streams == nullptr) return;
                           fill_bytes(backend, step.arena, arena_bytes);
                           streams->end(step.id.slot);
                         },
                     .ends =
                         [&backend, arena_bytes, &transport, streams](const Dispatcher::Step& step) {
                           if (streams != nullptr) return;
                           transport.quiet();
                           fill_bytes(backend, step.arena, arena_bytes);
                         }});
}

}  // namespace distca::emulation
