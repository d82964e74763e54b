#include "plan/origin.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/error.h"

namespace distca::plan {
namespace {

constexpr size_t kFirst = offsetof(Header, layout_digest) / 8, kEnd = offsetof(Header, retains) / 8;
constexpr size_t kArguments = offsetof(Header, arguments) / 8, kArgumentWords = sizeof(PlanArguments) / 8;

/// A capacity from here on binds nothing.
constexpr int64_t kUnlimited = int64_t{1} << 62;

Header header_of(const Origin& origin) {
  std::array<int64_t, kHeaderWords> words = {};
  const auto number = [](uint64_t word) { return static_cast<int64_t>(word); };
  std::transform(origin.begin(), origin.begin() + (kEnd - kFirst), words.begin() + kFirst, number);
  std::transform(origin.begin() + (kEnd - kFirst), origin.end(), words.begin() + kArguments, number);
  return std::bit_cast<Header>(words);
}

HeadShape heads_of(const Header& h) { return {h.q_heads, h.kv_heads, h.dim, h.v_dim, static_cast<DType>(h.dtype)}; }

Mask mask_of(const PlanArguments& a) { return {static_cast<MaskKind>(a.mask_kind), a.window}; }

/// Millionths as a fraction, such as "0.05".
std::string fraction(int64_t ppm) {
  std::string digits = std::to_string(1'000'000 + ppm % 1'000'000).substr(1);
  digits.erase(digits.find_last_not_of('0') + 1);
  return std::to_string(ppm / 1'000'000) + (digits.empty() ? "" : "." + digits);
}

}  // namespace

Origin origin_of(const Header& header) {
  const auto words = header_words(header);
  Origin origin;
  const auto end = std::copy(words.begin() + kFirst, words.begin() + kEnd, origin.begin());
  std::copy_n(words.begin() + kArguments, kArgumentWords, end);
  return origin;
}

bool is_label(std::string_view text) {
  return text.size() <= 8 * kLabelWords && std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

std::array<int64_t, kLabelWords> label_words(std::string_view text) {
  std::array<int64_t, kLabelWords> words = {};
  std::memcpy(words.data(), text.data(), std::min(text.size(), sizeof(words)));
  return words;
}

std::string label_of(const std::array<int64_t, kLabelWords>& words) {
  std::string text(sizeof(words), '\0');
  std::memcpy(text.data(), words.data(), sizeof(words));
  text.resize(text.find_last_not_of('\0') + 1);
  for (char& c : text)
    if (!is_label({&c, 1})) c = '?';
  return text;
}

std::string describe(const HeadShape& h) {
  return message(h.q_heads, " query heads and ", h.kv_heads, " key/value heads of dim ", h.dim, " (values ", h.v_dim,
                 "), ", dtype_name(h.dtype));
}

std::string describe(const Mask& mask) {
  const char* const kind = mask.is_full() ? "the full mask" : "the causal mask";
  return mask.window == 0 ? kind : message(kind, " with a window of ", mask.window);
}

std::string describe(const ScoresRow& s) {
  std::string text = describe(s.mask());
  if (s.scale != kOfTheCall) text += message(", scale ", score_value(s.scale));
  if (s.softcap != kOfTheCall) text += message(", softcap ", score_value(s.softcap));
  return text;
}

std::string difference(const OriginOnRank& one, const OriginOnRank& other) {
  const Header a = header_of(one.origin), b = header_of(other.origin);
  std::string found;
  const auto say = [&](const auto&... parts) { found += message(found.empty() ? "" : "; ", parts...); };
  const auto compare = [&](const std::string& what, const std::string& x, const std::string& y) {
    if (x != y) say(what, x, " on rank ", one.rank, ", ", y, " on rank ", other.rank);
  };
  if (a.label != b.label) {
    const auto label = [](const Header& h) {
      const std::string text = label_of(h.label);
      return text.empty() ? "no label" : message("\"", text, "\"");
    };
    compare("", label(a), label(b));
  }
  if (a.layout_digest != b.layout_digest) {
    const auto size = [](const PlanArguments& m) {
      return message(m.num_documents, " documents of ", m.num_tokens, " tokens");
    };
    if (size(a.arguments) != size(b.arguments))
      compare("", size(a.arguments), size(b.arguments));
    else
      say("documents of other lengths, on other ranks, or with other bidirectional rows or branches");
  }
  compare("", describe(heads_of(a)), describe(heads_of(b)));
  compare("", describe(mask_of(a.arguments)), describe(mask_of(b.arguments)));
  if (a.arguments.scores_digest != b.arguments.scores_digest && mask_of(a.arguments) == mask_of(b.arguments))
    say("other masks, windows, scales or softcaps of documents");
  compare("tolerance ", fraction(a.arguments.tolerance_ppm), fraction(b.arguments.tolerance_ppm));
  compare("min_rows ", std::to_string(a.arguments.min_rows), std::to_string(b.arguments.min_rows));
  const auto capacity = [](const PlanArguments& m) {
    return m.capacity >= kUnlimited ? "no capacity" : message("a capacity of ", m.capacity, " bytes");
  };
  compare("", capacity(a.arguments), capacity(b.arguments));
  if (a.cost_digest != b.cost_digest) say("another cost model");
  const auto choice = [&](const char* name, int64_t bit, const char* on, const char* off) {
    const auto value = [&](const Header& h) { return (h.arguments.choices & bit) != 0 ? on : off; };
    compare(name, value(a), value(b));
  };
  choice("balance ", kBalance, "on", "off");
  choice("split_heads ", kSplitHeads, "on", "off");
  choice("overlap ", kOverlap, "on", "off");
  choice("objective ", kForwardOnly, "forward", "all");
  const auto reduce_dtype = [](const Header& h) {
    const bool narrow = (h.arguments.choices & kReducesNarrow) != 0;
    return dtype_name(narrow ? static_cast<DType>(h.dtype) : DType::kFloat32);
  };
  compare("reduce_dtype ", reduce_dtype(a), reduce_dtype(b));
  if (a.arguments.lists_digest != b.arguments.lists_digest)
    say("other servers, speeds, ranks_per_node, round_bytes, retain_bytes or tasks");
  return found.empty() ? "made alike, but not by the same build of distca" : found;
}

}  // namespace distca::plan
