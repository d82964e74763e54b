#include "emulation/host_streams.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "common/align.h"
#include "common/memory.h"
#include "transport/host_memory.h"
#include "transport/shm_mesh.h"

namespace distca::emulation {

using namespace transport;

namespace {

/// The contents of a handle: a process, and its descriptor of the file that is the memory.
struct OpenFile {
  int32_t process, descriptor;
};

/// Does what the thread blocks of the put kernel do, one after another.
void put_all(std::span<const PutEntry> entries, std::span<const PutMessage> messages, const Guard& guard) {
  const PutEntry* e = entries.data();
  for (size_t i = 0; i < messages.size(); ++i) {
    const PutMessage& m = messages[i];
    if (is_stopped(guard)) return;
    if (m.credit != nullptr && !await(guard, {m.credit, m.credit_value, m.peer, Awaited::kCredit, m.round})) return;
    for (; e != entries.data() + entries.size() && e->message == static_cast<int32_t>(i); ++e) {
      const int64_t num_chunks = ceil_div(e->num_rows, e->rows_per_chunk);
      for (int64_t c = 0; c < num_chunks; ++c) {
        const Rows rows = rows_of_chunk(*e, e->first_chunk + static_cast<int32_t>(c));
        const auto num_words = static_cast<uint32_t>((rows.end - rows.begin) * e->words_per_row);
        const auto per_head = static_cast<uint32_t>(e->words_per_head);
        for (uint32_t word = 0; word < num_words; word += per_head) {
          const WordPlace place = place_of_word(*e, rows.begin, word);
          std::memcpy(place.to, place.from, per_head * static_cast<size_t>(e->word_bytes));
        }
      }
    }
    if (m.signal != nullptr) store_release(m.signal, m.signal_value);
  }
}

}  // namespace

struct HostStreams::Point {
  std::atomic<bool> is_reached{false};
};

HostStreams::HostStreams(std::chrono::milliseconds timeout)
    : guard_{&stopped_, &told_to_stop_, &fault_, static_cast<uint64_t>(std::chrono::nanoseconds(timeout).count())} {
  for (std::unique_ptr<Lane>& lane : lanes_)
    lane = std::make_unique<Lane>("distca stream", [](std::function<void()>& work) { std::exchange(work, nullptr)(); });
}

HostStreams::~HostStreams() { drain(); }

std::shared_ptr<std::byte> HostStreams::allocate(int64_t bytes) { return zeroed_host_memory(bytes); }

Streams::Shared HostStreams::allocate_shared(int64_t bytes) {
  struct File {
    Descriptor descriptor;
    Mapping mapping;
  };
  Descriptor made = shm::make_memory(bytes);
  const OpenFile handle = {::getpid(), made.get()};
  Mapping mapping = Mapping::shared(made.get(), bytes);
  auto file = std::make_shared<File>(std::move(made), std::move(mapping));
  Shared shared{{file, file->mapping.data()}, {}};
  std::memcpy(shared.handle.data(), &handle, sizeof(handle));
  return shared;
}

std::shared_ptr<std::byte> HostStreams::open(const IpcHandle& from, int64_t bytes) {
  OpenFile handle;
  std::memcpy(&handle, from.data(), sizeof(handle));
  const std::string path = message("/proc/", handle.process, "/fd/", handle.descriptor);
  const Descriptor descriptor([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); });
  struct stat status{};
  require<OperatingSystemError>(descriptor && ::fstat(descriptor.get(), &status) == 0 && status.st_size >= bytes,
                                "could not open ", bytes, " bytes of another rank's memory");
  auto mapping = std::make_shared<Mapping>(Mapping::shared(descriptor.get(), bytes));
  return {mapping, mapping->data()};
}

void HostStreams::queue(Stream stream, const char* operation, std::span<const TablePart> parts, Work work) {
  auto start = [this, stream, work = std::move(work)](const std::shared_ptr<const Table>& table) {
    lane(stream).post([this, work, table] {
      try {
        work(*table);
      } catch (...) {
        const std::lock_guard lock(thrown_mutex_);
        if (!thrown_) thrown_ = std::current_exception();
      }
    });
  };
  if (tape_) {
    tape_->add(operation, parts, std::move(start));
    return;
  }
  start(std::make_shared<const Table>(parts));
}

void HostStreams::record(int point, Stream stream) {
  if (tape_) {
    tape_->add("point", {}, [this, point, stream](const auto&) { record(point, stream); });
    return;
  }
  auto reached = std::make_shared<Point>();
  points_[static_cast<size_t>(point)] = reached;
  lane(stream).post([reached = std::move(reached)] {
    reached->is_reached = true;
    reached->is_reached.notify_all();
  });
}

void HostStreams::wait_for(Stream stream, int point) {
  if (tape_) {
    tape_->add("wait for a point", {}, [=, this](const auto&) { wait_for(stream, point); });
    return;
  }
  const std::shared_ptr<Point>& awaited = points_[static_cast<size_t>(point)];
  if (awaited) lane(stream).post([awaited] { awaited->is_reached.wait(false); });
}

void HostStreams::replay(const Tape& tape) {
  tape.replay();
  drain();  // then nobody reads the tables
  join_host();
}

void HostStreams::join_host() {
  if (tape_) return;
  lane(Stream::kWork).drain();
  std::exception_ptr thrown;
  {
    const std::lock_guard lock(thrown_mutex_);
    thrown.swap(thrown_);
  }
  if (thrown) std::rethrow_exception(thrown);
}

void HostStreams::drain() noexcept {
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->drain();
}

void HostStreams::put(const PutTable& table) {
  const std::array parts = {table_part("extents of rows", table.entries()), table_part("messages", table.messages())};
  queue(Stream::kTransfer, "put", parts,
        [this](const Table& t) { put_all(t.get<PutEntry>(0), t.get<PutMessage>(1), guard_); });
}

void HostStreams::signal(std::span<const SignalTo> signals) {
  queue(Stream::kTransfer, "signal", std::array{table_part("signals", signals)}, [this](const Table& t) {
    if (is_stopped()) return;
    for (const SignalTo& s : t.get<SignalTo>(0)) store_release(s.word, s.value);
  });
}

void HostStreams::send(const SendTable& table, const std::shared_ptr<Sender>& sender) {
  const std::array parts = {table_part("messages", table.messages()), table_part("pieces", table.pieces())};
  queue(Stream::kTransfer, "send", parts, [this, sender](const Table& t) {
    const auto messages = t.get<SendMessage>(0);
    const uint64_t num_messages = messages.size();
    sender->send({&num_messages, messages.data(), t.get<SendPiece>(1).data(), messages.size()}, guard_, nullptr);
  });
}

void HostStreams::quiet(const std::shared_ptr<Sender>& sender) {
  queue(Stream::kTransfer, "quiet", {}, [sender](const Table&) { sender->quiet(nullptr); });
}

void HostStreams::await(std::span<const AwaitedMessage> messages) {
  queue(Stream::kWork, "wait", std::array{table_part("messages", messages)}, [this](const Table& t) {
    if (is_stopped()) return;
    for (const AwaitedMessage& m : t.get<AwaitedMessage>(0))
      if (!transport::await(guard_, m)) return;
  });
}

void HostStreams::fill_nan_if_stopped(const RowView& to, const RowExtent& extent) {
  const std::array parts = {table_value("rows", to), table_value("extent", extent)};
  queue(Stream::kWork, "fill", parts, [this](const Table& t) {
    if (!is_stopped()) return;
    const RowView rows = t.get<RowView>(0)[0];
    const RowExtent n = t.get<RowExtent>(1)[0];
    for (int64_t i = 0; i < n.num_rows; ++i)
      for (int64_t h = 0; h < n.num_heads; ++h) std::memset(rows.at(i, h), 0xff, static_cast<size_t>(n.head_bytes));
  });
}

std::optional<StreamFault> HostStreams::fault() const {
  if (!is_set(&fault_.is_set)) return std::nullopt;  // an acquire, because the rest was written before
  return fault_;
}

}  // namespace distca::emulation
