#include "sequences.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "values.h"

namespace gspo_kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Sequence {
    int64_t count = 0;  // of tokens that the loss counts
    double length = 0, log_ratio = 0, ratio = 1, loss = 0, coefficient = 0;
    bool low = false, high = false;
};

// Sums, ratio and clip decision in fp64; a token that does not count is never looked at.
template <class S>
Sequence reduce_tokens(const S* logprobs, const bool* mask, const Reals& old, int64_t begin, int64_t end) {
    Sequence sequence;
    for (int64_t token = begin; token < end; ++token) {
        if (!mask[token]) continue;
        const double now = logprobs[token];
        const double before = old ? old[token] : now;
        if (now != before) sequence.log_ratio += now - before;  // else 1, where both are -inf, too
        ++sequence.count;
    }
    return sequence;
}

void clip(Sequence& sequence, double advantage, double weight, const ClippedSequenceRatio& form) {
    const double log_s = sequence.log_ratio / sequence.length;
    sequence.ratio = std::exp(log_s);
    sequence.low = advantage < 0 && log_s < form.log_low;
    sequence.high =
        (advantage > 0 && log_s > form.log_high) || (advantage < 0 && log_s > form.log_dual);
    if (advantage == 0 || weight == 0) return;
    // Bounded before the exponential, by selection: nothing gives 0 * inf, and NaN stays NaN.
    const bool clipped = sequence.low || sequence.high;
    const double bound = sequence.low ? form.log_low : advantage > 0 ? form.log_high : form.log_dual;
    const double scale = weight * advantage, enters = form.count_tokens ? sequence.length : 1.0;
    sequence.loss = -scale * std::exp(clipped ? bound : log_s) * enters;
    sequence.coefficient = clipped ? 0.0 : -scale * sequence.ratio * enters / sequence.length;
}

double share(double part, double whole) { return part / (whole > 0 ? whole : 1.0); }

// In the order of types.METRICS.
template <class S>
void reduce_batch(const std::vector<Sequence>& batch, double divisor, S* loss, S* metrics) {
    double losses = 0, ratios = 0, least = kInfinity, most = -kInfinity, drift = 0;
    double number = 0, tokens = 0, lows = 0, highs = 0, clipped_tokens = 0, actives = 0;
    for (const Sequence& sequence : batch) {
        if (sequence.count == 0) continue;
        ++number;
        tokens += sequence.count;
        losses += sequence.loss;
        ratios += sequence.ratio;
        least = std::min(least, sequence.ratio);
        most = std::max(most, sequence.ratio);
        drift -= sequence.log_ratio;
        lows += sequence.low;
        highs += sequence.high;
        clipped_tokens += (sequence.low || sequence.high) ? sequence.count : 0;
        actives += static_cast<S>(sequence.coefficient) != 0;
    }
    *loss = static_cast<S>(losses / divisor);
    const double mean = share(ratios, number);
    const bool undefined = std::isnan(mean), some = number > 0;
    metrics[0] = static_cast<S>(some ? mean : 1.0);
    metrics[1] = static_cast<S>(undefined ? mean : some ? least : 1.0);
    metrics[2] = static_cast<S>(undefined ? mean : some ? most : 1.0);
    metrics[3] = static_cast<S>(share(lows, number));
    metrics[4] = static_cast<S>(share(highs, number));
    metrics[5] = static_cast<S>(share(clipped_tokens, tokens));
    metrics[6] = static_cast<S>(share(drift, tokens));
    metrics[7] = static_cast<S>(share(actives, number));
}

}  // namespace

void sequence_ratio_step(const Tensor& logprobs, const SequenceTokens& tokens,
                         const ClippedSequenceRatio& form, const SequenceOutputs& outputs) {
    const auto work = [&](auto dtype) {
        using S = decltype(dtype);
        const int64_t sequences = outputs.coefficients.numel(), count = logprobs.numel();
        const int64_t padded = count / std::max<int64_t>(1, sequences);
        const S* now = values<S>(logprobs);
        const Reals old(tokens.old_logprobs), advantages(tokens.advantages), weights(tokens.weights);
        const Reals lengths(tokens.lengths), normalizer(tokens.normalizer);
        const int64_t* offsets = values<int64_t>(tokens.offsets);
        S* coefficient = mutable_values<S>(outputs.coefficients);
        const auto tokens_of = [&](int64_t i) {
            return offsets ? std::pair(offsets[i], offsets[i + 1]) : std::pair(i * padded, (i + 1) * padded);
        };
        std::vector<Sequence> batch(sequences);
        const int64_t grain = std::max<int64_t>(1, (1 << 15) * sequences / std::max<int64_t>(1, count));
        const auto for_each_sequence = [&](const auto& body) {
            torch::stable::parallel_for(0, sequences, grain, [&](int64_t first, int64_t last) {
                for (int64_t i = first; i < last; ++i) body(i);
            });
        };
        for_each_sequence([&](int64_t i) {
            const auto [begin, end] = tokens_of(i);
            batch[i] = reduce_tokens(now, tokens.mask, old, begin, end);
            if (batch[i].count) {
                batch[i].length = lengths ? lengths[i] : batch[i].count;
                clip(batch[i], advantages[i], weights ? weights[i] : 1.0, form);
            }
            coefficient[i] = static_cast<S>(batch[i].coefficient);
        });
        double total = form.divisor == 2 ? 1.0 : 0.0;
        if (normalizer) {
            total = normalizer[0];
        } else if (form.divisor != 2) {
            for (const Sequence& sequence : batch) {
                if (sequence.count) total += form.divisor == 0 ? 1.0 : sequence.length;
            }
        }
        total = (total == 0 ? 1.0 : total) * form.divisor_scale;
        *mutable_values<S>(outputs.divisor) = static_cast<S>(total);
        reduce_batch(batch, total, mutable_values<S>(outputs.loss), mutable_values<S>(outputs.metrics));
        if (!outputs.grad_logprobs) return;
        S* grad = mutable_values<S>(*outputs.grad_logprobs);
        for_each_sequence([&](int64_t i) {
            const auto [begin, end] = tokens_of(i);
            const S each = coefficient[i] / static_cast<S>(total);
            for (int64_t token = begin; token < end; ++token) grad[token] = tokens.mask[token] ? each : S(0);
        });
    };
    if (logprobs.scalar_type() == torch::headeronly::ScalarType::Double) {
        work(double{});
    } else {
        work(float{});
    }
}

bool merge_mask(const LabelledMask& given, Tensor& counted, std::optional<Tensor>& merged) {
    const auto work = [&](auto dtype) {
        using N = decltype(dtype);
        const N* mask = values<N>(given.mask);
        const int64_t* label = values<int64_t>(given.labels);
        int64_t* out = merged ? mutable_values<int64_t>(*merged) : nullptr;
        bool *counts = mutable_values<bool>(counted), binary = true;
        for (int64_t i = 0; i < given.mask.numel(); ++i) {
            const bool given_in = mask[i] != 0;
            binary &= mask[i] == N(given_in);
            counts[i] = given_in && !(label && label[i] == given.ignore_index);
            if (out) out[i] = given_in ? label[i] : given.ignore_index;
        }
        return binary;
    };
    using torch::headeronly::ScalarType;
    switch (given.mask.scalar_type()) {
        case ScalarType::Bool:
            return work(bool{});
        case ScalarType::Float:
            return work(float{});
        case ScalarType::Double:
            return work(double{});
        case ScalarType::Int:
            return work(int32_t{});
        default:
            STD_TORCH_CHECK(given.mask.scalar_type() == ScalarType::Long, "mask: dtype is not served");
            return work(int64_t{});
    }
}

}  // namespace gspo_kernels
