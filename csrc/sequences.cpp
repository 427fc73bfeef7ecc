#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "clones.h"
#include "operators.h"
#include "values.h"
#include "vec_math.h"

namespace gspo_kernels {
namespace {

// Sums over the tokens that a mask counts; other values are ignored.
struct CountedSum {
    int64_t count;
    double log_ratio;
};

// Sums now - old in fp64. Equal log-probs have the difference 0, even if both are -inf. Token i is added to
// lane i % 16, independent of padding after a sequence.
template <class S, class O>
GSPO_INLINE CountedSum counted_sum_of(const S* now, const O* old, const bool* mask, int64_t n) {
    constexpr int64_t kLanes = 16, kAtOnce = 128;
    alignas(64) double sums[kLanes] = {}, terms[kAtOnce];
    const uint8_t* counts = reinterpret_cast<const uint8_t*>(mask);
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kAtOnce) {
        const int64_t size = n - begin < kAtOnce ? n - begin : kAtOnce;
        uint8_t counted_here = 0;
        for (int64_t i = 0; i < size; ++i) {
            const double a = now[begin + i], b = old[begin + i];
            terms[i] = select(counts[begin + i] == 0, 0.0, select(a == b, 0.0, a - b));
        }
        for (int64_t i = 0; i < size; ++i) counted_here += counts[begin + i];
        count += counted_here;
        for (int64_t i = size; i % kLanes != 0; ++i) terms[i] = 0;
        for (int64_t i = 0; i < size; i += kLanes) {
            for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += terms[i + lane];
        }
    }
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    return {count, sums[0]};
}

// In nats. Log-probs are at most 0, but may exceed it a little if they were rounded to 16 bits.
constexpr double kHighestLogprob = 1;

// Whether any value is above kHighestLogprob, or is a NaN with the sign of a positive number. Values of
// tokens that don't count are checked, too. As integers, positive numbers keep their order, and negative
// numbers are below them.
template <class S>
GSPO_INLINE bool any_above_of(const S* values, int64_t n) {
    using Bits = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
    constexpr int64_t kLanes = 64;
    alignas(64) Bits lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const Bits bits = std::bit_cast<Bits>(values[i + lane]);
            lanes[lane] = select(bits > lanes[lane], bits, lanes[lane]);
        }
    }
    for (; i < n; ++i) lanes[0] = std::max(lanes[0], std::bit_cast<Bits>(values[i]));
    Bits highest = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) highest = std::max(highest, lanes[lane]);
    return highest > std::bit_cast<Bits>(S(kHighestLogprob));
}

// Writes `value` where the mask counts, 0 elsewhere.
template <class S>
GSPO_INLINE void write_counted_of(const bool* mask, int64_t n, S value, S* __restrict out) {
    const uint8_t* counts = reinterpret_cast<const uint8_t*>(mask);
    for (int64_t i = 0; i < n; ++i) out[i] = select(counts[i] == 0, S(0), value);
}

// Implements `merge_mask`; labels and merged may be null. Returns whether the mask holds only 0 and 1.
template <class N>
GSPO_INLINE bool merge_of(const N* mask, const int64_t* labels, int64_t ignore_index, int64_t n,
                          bool* counted, int64_t* merged) {
    uint8_t* __restrict counts = reinterpret_cast<uint8_t*>(counted);
    uint8_t other = 0;
    for (int64_t i = 0; i < n; ++i) {
        counts[i] = select<uint8_t>(mask[i] == N(0), 0, 1);
        other |= select<uint8_t>(mask[i] == N(0), 0, select<uint8_t>(mask[i] == N(1), 0, 1));
    }
#pragma GCC ivdep
    for (int64_t i = 0; labels && i < n; ++i) counts[i] &= labels[i] != ignore_index;
#pragma GCC ivdep
    for (int64_t i = 0; merged && i < n; ++i) merged[i] = mask[i] != N(0) ? labels[i] : ignore_index;
    return other == 0;
}

}  // namespace

#define GSPO_DEFINE_COUNTED_SUM(S, O)                                                             \
    GSPO_CLONES CountedSum counted_sum(const S* now, const O* old, const bool* mask, int64_t n) { \
        return counted_sum_of(now, old, mask, n);                                                 \
    }
GSPO_DEFINE_COUNTED_SUM(float, float)
GSPO_DEFINE_COUNTED_SUM(float, double)
GSPO_DEFINE_COUNTED_SUM(double, float)
GSPO_DEFINE_COUNTED_SUM(double, double)

#define GSPO_DEFINE_ANY_ABOVE(S)                             \
    GSPO_CLONES bool any_above(const S* values, int64_t n) { \
        return any_above_of(values, n);                      \
    }
GSPO_DEFINE_ANY_ABOVE(float)
GSPO_DEFINE_ANY_ABOVE(double)

#define GSPO_DEFINE_WRITE_COUNTED(S)                                               \
    GSPO_CLONES void write_counted(const bool* mask, int64_t n, S value, S* out) { \
        write_counted_of(mask, n, value, out);                                     \
    }
GSPO_DEFINE_WRITE_COUNTED(float)
GSPO_DEFINE_WRITE_COUNTED(double)

#define GSPO_DEFINE_MERGE(N)                                                                      \
    GSPO_CLONES bool merge(const N* mask, const int64_t* labels, int64_t ignore_index, int64_t n, \
                           bool* counted, int64_t* merged) {                                      \
        return merge_of(mask, labels, ignore_index, n, counted, merged);                          \
    }
GSPO_DEFINE_MERGE(bool)
GSPO_DEFINE_MERGE(float)
GSPO_DEFINE_MERGE(double)
GSPO_DEFINE_MERGE(int32_t)
GSPO_DEFINE_MERGE(int64_t)

namespace {

constexpr int64_t kGrain = 1 << 15;  // minimum of tokens per thread
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Clipped {
    double ratio, loss = 0, coefficient = 0;  // of the log-ratio
    bool low, high;
};

// The sums of one sequence over its tokens that count; sequences without such tokens are skipped.
struct Sequence {
    int64_t count = 0, clipped_tokens = 0;  // of tokens that the loss counts
    double length = 1, log_ratio = 0, loss = 0, kl = 0;
    double ratios = 0, min_ratio = kInfinity, max_ratio = -kInfinity;
    int64_t lows = 0, highs = 0;
    bool active = false, recheck = false;

    void add(const Clipped& clipped, int64_t tokens) {
        ratios += clipped.ratio;
        min_ratio = std::min(min_ratio, clipped.ratio);
        max_ratio = std::max(max_ratio, clipped.ratio);
        lows += clipped.low;
        highs += clipped.high;
        clipped_tokens += (clipped.low || clipped.high) ? tokens : 0;
    }
};

// Equal log-probs have the ratio 1, even if both are -inf.
double difference(double a, double b) {
    return a == b ? 0.0 : a - b;
}

// 0 * inf is 0.
double product(double a, double b) {
    return a == 0 || b == 0 ? 0.0 : a * b;
}

// PPO's clip; ratio and clip decision in fp64.
Clipped clip(double log_ratio, double advantage, double weight, const RatioClip& bounds) {
    Clipped result{.ratio = std::exp(log_ratio),
                   .low = advantage < 0 && log_ratio < bounds.log_low,
                   .high = (advantage > 0 && log_ratio > bounds.log_high) ||
                           (advantage < 0 && log_ratio > bounds.log_dual)};
    if (advantage == 0 || weight == 0) return result;
    // Select the bound before the exponential, to avoid 0 * inf and to propagate NaN.
    const bool clipped = result.low || result.high;
    const double bound = result.low ? bounds.log_low : advantage > 0 ? bounds.log_high : bounds.log_dual;
    const double scale = weight * advantage;
    result.loss = -scale * std::exp(clipped ? bound : log_ratio);
    result.coefficient = clipped ? 0.0 : -scale * result.ratio;
    return result;
}

struct Penalty {
    double value, slope;
};

// objective_loss.kl_penalty of the log-ratio to the reference, and its derivative.
Penalty kl_penalty(double d, int64_t estimator) {
    if (estimator == 1) return {d, 1.0};
    if (estimator == 2) return {0.5 * d * d, d};
    const double grown = std::expm1(-d);  // outgrows d, also where both are infinite
    return {grown + std::max(d, std::numeric_limits<double>::lowest()), -grown};
}

// `any_above` of elements `begin` to `end` of log-probs; false if there are no log-probs.
bool above(const std::optional<Tensor>& logprobs, int64_t begin, int64_t end) {
    if (!logprobs) return false;
    if (logprobs->scalar_type() == torch::headeronly::ScalarType::Double) {
        return any_above(values<double>(logprobs) + begin, end - begin);
    }
    return any_above(values<float>(logprobs) + begin, end - begin);
}

// One number per sequence, or per token if the tensor has two dimensions; 1 without a tensor.
class Factors {
  public:
    explicit Factors(const std::optional<Tensor>& tensor)
        : values_(tensor), per_token_(tensor && tensor->dim() == 2) {}

    double at(int64_t sequence, int64_t token) const {
        return values_ ? values_[per_token_ ? token : sequence] : 1.0;
    }

  private:
    Reals values_;
    bool per_token_;
};

double share(double part, double total) {
    return part / (total > 0 ? total : 1.0);
}

// Computes the loss, and the metrics in the order of types.METRICS, followed by the KL if that is wanted.
// Returns false if values must be rechecked.
template <class S>
bool reduce_batch(const std::vector<Sequence>& batch, double divisor, bool per_token, bool with_kl, S* loss,
                  S* metrics) {
    double losses = 0, ratios = 0, min_ratio = kInfinity, max_ratio = -kInfinity, drift = 0, kl = 0;
    double number = 0, tokens = 0, lows = 0, highs = 0, clipped_tokens = 0, actives = 0;
    bool recheck = false;
    for (const Sequence& sequence : batch) {
        if (sequence.count == 0) continue;
        ++number;
        tokens += sequence.count;
        losses += sequence.loss;
        ratios += sequence.ratios;
        min_ratio = std::min(min_ratio, sequence.min_ratio);
        max_ratio = std::max(max_ratio, sequence.max_ratio);
        drift -= sequence.log_ratio;
        lows += sequence.lows;
        highs += sequence.highs;
        clipped_tokens += sequence.clipped_tokens;
        actives += sequence.active;
        kl += sequence.kl;
        recheck |= sequence.recheck;
    }
    *loss = static_cast<S>(losses / divisor);
    const double items = per_token ? tokens : number, mean = share(ratios, items);
    const bool undefined = std::isnan(mean), some = number > 0;
    metrics[0] = static_cast<S>(some ? mean : 1.0);
    metrics[1] = static_cast<S>(undefined ? mean : some ? min_ratio : 1.0);
    metrics[2] = static_cast<S>(undefined ? mean : some ? max_ratio : 1.0);
    metrics[3] = static_cast<S>(share(lows, items));
    metrics[4] = static_cast<S>(share(highs, items));
    metrics[5] = static_cast<S>(share(clipped_tokens, tokens));
    metrics[6] = static_cast<S>(share(drift, tokens));
    metrics[7] = static_cast<S>(share(actives, number));
    if (with_kl) metrics[8] = static_cast<S>(share(kl, tokens));
    return !recheck && !std::isnan(losses);
}

}  // namespace

bool ratio_step(const Tensor& logprobs, const SequenceTokens& tokens, const RatioClip& ratio_clip,
                const SequenceOutputs& outputs) {
    const auto work = [&](auto dtype) {
        using S = decltype(dtype);
        const int64_t count = logprobs.numel();
        const int64_t sequences = tokens.offsets ? tokens.offsets->numel() - 1 : logprobs.size(0);
        const int64_t padded = count / std::max<int64_t>(1, sequences);
        const S* now = values<S>(logprobs);
        const Reals old(tokens.old_logprobs), lengths(tokens.lengths), normalizer(tokens.normalizer);
        const Reals reference(tokens.ref_logprobs), beta(tokens.kl_beta);
        const Factors advantages(tokens.advantages), weights(tokens.weights);
        const int64_t* offsets = values<int64_t>(tokens.offsets);
        const auto tokens_of = [&](int64_t i) {
            return offsets ? std::pair(offsets[i], offsets[i + 1]) : std::pair(i * padded, (i + 1) * padded);
        };
        const auto log_ratio_of = [&](int64_t token) {
            return difference(now[token], old ? old[token] : now[token]);
        };
        const auto sum = [&](int64_t begin, int64_t n) {
            const bool* mask = tokens.mask + begin;
            if (!tokens.old_logprobs) return counted_sum(now + begin, now + begin, mask, n);
            if (tokens.old_logprobs->scalar_type() == torch::headeronly::ScalarType::Double) {
                return counted_sum(now + begin, values<double>(tokens.old_logprobs) + begin, mask, n);
            }
            return counted_sum(now + begin, values<float>(tokens.old_logprobs) + begin, mask, n);
        };
        std::vector<Sequence> batch(sequences);
        const int64_t grain = std::max<int64_t>(1, kGrain * sequences / std::max<int64_t>(1, count));
        const auto for_each_sequence = [&](const auto& body) {
            torch::stable::parallel_for(0, sequences, grain, [&](int64_t first, int64_t last) {
                for (int64_t i = first; i < last; ++i) body(i, batch[i]);
            });
        };
        for_each_sequence([&](int64_t i, Sequence& sequence) {
            const auto [begin, end] = tokens_of(i);
            const auto [count, log_ratio] = sum(begin, end - begin);
            sequence.count = count;
            sequence.log_ratio = log_ratio;
            sequence.recheck = std::isnan(log_ratio) || any_above(now + begin, end - begin) ||
                               above(tokens.old_logprobs, begin, end) ||
                               above(tokens.ref_logprobs, begin, end);
            if (sequence.count) sequence.length = lengths ? lengths[i] : sequence.count;
        });
        double total = ratio_clip.divisor == 2 ? 1.0 : 0.0;
        if (normalizer) {
            total = normalizer[0];
        } else if (ratio_clip.divisor != 2) {
            for (const Sequence& sequence : batch) {
                if (sequence.count) total += ratio_clip.divisor == 0 ? 1.0 : sequence.length;
            }
        }
        total = (total == 0 ? 1.0 : total) * ratio_clip.divisor_scale;
        S* grad = outputs.grad_logprobs ? mutable_values<S>(*outputs.grad_logprobs) : nullptr;
        S* coefficients = outputs.coefficients ? mutable_values<S>(*outputs.coefficients) : nullptr;
        for_each_sequence([&](int64_t i, Sequence& sequence) {
            const auto [begin, end] = tokens_of(i);
            // the weight of a token's values in the sum that the divisor divides
            const double each = ratio_clip.count_tokens ? 1.0 : 1.0 / sequence.length;
            double coefficient = 0;
            if (sequence.count && !ratio_clip.per_token) {
                const Clipped clipped = clip(sequence.log_ratio / sequence.length, advantages.at(i, 0),
                                             weights.at(i, 0), ratio_clip);
                sequence.add(clipped, sequence.count);
                sequence.loss = clipped.loss * (ratio_clip.count_tokens ? sequence.length : 1.0);
                coefficient = clipped.coefficient * each;
                sequence.active = coefficient != 0;
                sequence.recheck |= std::isnan(advantages.at(i, 0));
            }
            if (coefficients) coefficients[i] = static_cast<S>(coefficient);
            if (!grad) return;
            if (!ratio_clip.per_token && !reference) {
                return write_counted(tokens.mask + begin, end - begin, static_cast<S>(coefficient / total),
                                     grad + begin);
            }
            double losses = 0;
            for (int64_t token = begin; token < end; ++token) {
                grad[token] = 0;
                if (!tokens.mask[token]) continue;
                double slope = coefficient;
                if (ratio_clip.per_token) {
                    const Clipped clipped =
                        clip(log_ratio_of(token), advantages.at(i, token), weights.at(i, token), ratio_clip);
                    sequence.add(clipped, 1);
                    losses += clipped.loss;
                    slope = clipped.coefficient * each;
                }
                if (reference) {
                    const Penalty kl =
                        kl_penalty(difference(now[token], reference[token]), tokens.kl_estimator);
                    sequence.kl += kl.value;
                    if (beta) {
                        losses += product(beta[token], kl.value);
                        slope += product(beta[token], kl.slope) * each;
                    }
                }
                sequence.active |= slope != 0;
                grad[token] = static_cast<S>(slope / total);
            }
            sequence.loss += losses * each;
        });
        if (outputs.divisor) *mutable_values<S>(*outputs.divisor) = static_cast<S>(total);
        return reduce_batch(batch, total, ratio_clip.per_token, bool(reference),
                            mutable_values<S>(outputs.loss), mutable_values<S>(outputs.metrics));
    };
    return logprobs.scalar_type() == torch::headeronly::ScalarType::Double ? work(double{}) : work(float{});
}

bool merge_mask(const Tensor& mask, const std::optional<Tensor>& labels, int64_t ignore_index, bool* counted,
                std::optional<Tensor>& merged) {
    const auto work = [&](auto dtype) {
        using N = decltype(dtype);
        const N* in = values<N>(mask);
        const int64_t* label = values<int64_t>(labels);
        int64_t* out = merged ? mutable_values<int64_t>(*merged) : nullptr;
        std::atomic<bool> binary{true};
        torch::stable::parallel_for(0, mask.numel(), kGrain, [&](int64_t begin, int64_t end) {
            if (!merge(in + begin, label ? label + begin : nullptr, ignore_index, end - begin,
                       counted + begin, out ? out + begin : nullptr)) {
                binary = false;
            }
        });
        return binary.load();
    };
    using torch::headeronly::ScalarType;
    switch (mask.scalar_type()) {
        case ScalarType::Bool:
            return work(bool{});
        case ScalarType::Float:
            return work(float{});
        case ScalarType::Double:
            return work(double{});
        case ScalarType::Int:
            return work(int32_t{});
        default:
            STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Long, "mask: dtype is not served");
            return work(int64_t{});
    }
}

}  // namespace gspo_kernels
