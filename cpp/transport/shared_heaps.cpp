#include "transport/shared_heaps.h"

#include <cstring>
#include <utility>

#include "common/align.h"

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a rank that closes waits for the others to let go of its memory. If they do not, it keeps the memory until
/// the process ends.
constexpr std::chrono::seconds kLettingGo{2};

/// The message of a rank to each other rank: how to reach its memory, and how large the heap in it is.
struct Offer {
  Streams::IpcHandle handle;
  int64_t heap_bytes;
};
static_assert(sizeof(Offer) == sizeof(Streams::IpcHandle) + 8);

/// An offer travels in signal words behind those of the steps, 4 bytes in each. Because signals may overtake each
/// other, each word has a bit that says that it came.
constexpr int64_t kOfferWords = sizeof(Offer) / 4;
constexpr uint64_t kCame = uint64_t{1} << 32;

/// The word by which that rank says that it let go. Steps leave this word of the control transport alone, because the
/// words that they use at this place are on the devices.
int64_t let_go_word(int64_t rank) { return rank; }
int64_t offer_word(int64_t num_words, int64_t rank, int64_t index) { return num_words + rank * kOfferWords + index; }

/// The memory of all ranks as this process sees it.
class SharedHeaps {
 public:
  SharedHeaps(Transport& control, Streams::Shared own) : control_(control), own_(std::move(own.memory)) {
    opened_.resize(static_cast<size_t>(control.num_ranks()));
  }
  /// A rank may not free memory that another rank still has open. Therefore all ranks let go of the others' memory
  /// first.
  ~SharedHeaps() {
    opened_.clear();
    bool is_let_go = true;
    try {
      const Clock::time_point deadline = Clock::now() + kLettingGo;
      for (int p = 0; p < control_.num_ranks(); ++p)
        if (p != control_.rank()) control_.signal(p, let_go_word(control_.rank()), 1);
      for (int p = 0; p < control_.num_ranks() && is_let_go; ++p)
        is_let_go = p == control_.rank() || await_peer(p, let_go_word(p), deadline);
    } catch (const Error&) {
      is_let_go = false;  // in a forked child
    }
    if (!is_let_go) static_cast<void>(new std::shared_ptr<std::byte>(std::move(own_)));
  }

  std::byte* own() const { return own_.get(); }
  std::byte* open(int peer, Streams& streams, const Streams::IpcHandle& handle, int64_t bytes) {
    return (opened_[static_cast<size_t>(peer)] = streams.open(handle, bytes)).get();
  }

 private:
  /// Waits until the peer has written the word or is gone. Returns false if the deadline has passed.
  bool await_peer(int peer, int64_t word, Clock::time_point deadline) {
    struct Gone {};
    try {
      return control_.wait(word, 1, deadline, [&] {
        if (control_.departed(peer)) throw Gone();
      });
    } catch (const Gone&) {
      return true;
    }
  }

  Transport& control_;
  std::shared_ptr<std::byte> own_;
  std::vector<std::shared_ptr<std::byte>> opened_;
};

/// Makes this rank's offer to all others.
void hand_out(Transport& control, int64_t num_words, const Offer& offer) {
  for (int p = 0; p < control.num_ranks(); ++p) {
    if (p == control.rank()) continue;
    for (int64_t i = 0; i < kOfferWords; ++i) {
      uint32_t part;
      std::memcpy(&part, reinterpret_cast<const std::byte*>(&offer) + 4 * i, sizeof(part));
      control.signal(p, offer_word(num_words, control.rank(), i), kCame | part);
    }
  }
}

Offer offer_of(Transport& control, int64_t num_words, int peer, Clock::time_point deadline) {
  Offer offer;
  for (int64_t i = 0; i < kOfferWords; ++i) {
    const int64_t word = offer_word(num_words, peer, i);
    const bool came = control.wait(word, kCame, deadline, [&] {
      // A rank that is gone may have sent its whole offer before.
      require<PeerDiedError>(!control.departed(peer) || control.load(word) >= kCame, "rank ", peer,
                             " is gone before its memory could be reached");
    });
    require<PeerTimeoutError>(came, "rank ", peer, " does not share its memory");
    const auto part = static_cast<uint32_t>(control.load(word));
    std::memcpy(reinterpret_cast<std::byte*>(&offer) + 4 * i, &part, sizeof(part));
  }
  return offer;
}

/// The offers of all ranks except this one. The heaps must have one size, because a rank computes addresses in its
/// peers' heaps from the size of its own.
std::vector<Offer> take_offers(Transport& control, int64_t num_words, int64_t heap_bytes, Clock::time_point deadline) {
  std::vector<Offer> offers(static_cast<size_t>(control.num_ranks()));
  for (int p = 0; p < control.num_ranks(); ++p) {
    if (p == control.rank()) continue;
    const Offer& offer = offers[static_cast<size_t>(p)] = offer_of(control, num_words, p, deadline);
    require(offer.heap_bytes == heap_bytes, "rank ", p, " has a heap of ", offer.heap_bytes, " bytes, rank ",
            control.rank(), " one of ", heap_bytes,
            "; give all ranks the same heap_bytes, or the same max_tokens and heads");
  }
  return offers;
}

}  // namespace

int64_t control_words(int num_ranks, int64_t num_words) { return num_words + num_ranks * kOfferWords; }

std::unique_ptr<Transport> share_heaps(const char* name, std::unique_ptr<Transport> control,
                                       std::shared_ptr<Streams> streams, int64_t heap_bytes, int64_t num_words,
                                       Clock::time_point deadline) {
  const int64_t words_bytes = round_up(num_words * 8, kPageBytes);
  const int64_t bytes = words_bytes + round_up(heap_bytes, kPageBytes);
  Streams::Shared own = streams->allocate_shared(bytes);
  hand_out(*control, num_words, {own.handle, heap_bytes});
  // No rank opens another's memory before it has compared all offers. Therefore a rank that refuses may free its own.
  const std::vector<Offer> offers = take_offers(*control, num_words, heap_bytes, deadline);
  auto heaps = std::make_shared<SharedHeaps>(*control, std::move(own));
  DeviceHeaps ranks{.ranks = {}, .heap_bytes = heap_bytes, .num_words = num_words, .owner = heaps};
  for (int p = 0; p < control->num_ranks(); ++p) {
    std::byte* const base =
        p == control->rank() ? heaps->own() : heaps->open(p, *streams, offers[static_cast<size_t>(p)].handle, bytes);
    ranks.ranks.push_back({base + words_bytes, reinterpret_cast<uint64_t*>(base)});
  }
  return std::make_unique<StreamTransport>(name, std::move(control), std::move(streams), std::move(ranks));
}

}  // namespace distca::transport
