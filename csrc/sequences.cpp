#include "sequences.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
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
Sequence reduce_tokens(const S* logprobs, const bool* mask, const double* old, int64_t begin, int64_t end) {
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

void sequence_ratio_step(const SequenceTokens& tokens, const ClippedSequenceRatio& form, Tensor& loss,
                         Tensor& coefficients, Tensor& divisor, Tensor& metrics) {
    const auto work = [&](auto dtype) {
        using S = decltype(dtype);
        const int64_t sequences = tokens.advantages.numel(), count = tokens.logprobs.numel();
        const int64_t padded = count / std::max<int64_t>(1, sequences);
        const S* logprobs = values<S>(tokens.logprobs);
        const bool* mask = values<bool>(tokens.mask);
        const double *old = values<double>(tokens.old_logprobs), *advantages = values<double>(tokens.advantages);
        const double *weights = values<double>(tokens.weights), *lengths = values<double>(tokens.lengths);
        const int64_t* offsets = values<int64_t>(tokens.offsets);
        S* coefficient = mutable_values<S>(coefficients);
        std::vector<Sequence> batch(sequences);
        const int64_t grain = std::max<int64_t>(1, (1 << 15) * sequences / std::max<int64_t>(1, count));
        torch::stable::parallel_for(0, sequences, grain, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const int64_t begin = offsets ? offsets[i] : i * padded;
                const int64_t end = offsets ? offsets[i + 1] : begin + padded;
                batch[i] = reduce_tokens(logprobs, mask, old, begin, end);
                if (batch[i].count) {
                    batch[i].length = lengths ? lengths[i] : batch[i].count;
                    clip(batch[i], advantages[i], weights ? weights[i] : 1.0, form);
                }
                coefficient[i] = static_cast<S>(batch[i].coefficient);
            }
        });
        double total = form.divisor == 2 ? 1.0 : 0.0;
        if (tokens.normalizer) {
            total = *values<double>(tokens.normalizer);
        } else if (form.divisor != 2) {
            for (const Sequence& sequence : batch) {
                if (sequence.count) total += form.divisor == 0 ? 1.0 : sequence.length;
            }
        }
        total = (total == 0 ? 1.0 : total) * form.divisor_scale;
        *mutable_values<S>(divisor) = static_cast<S>(total);
        reduce_batch(batch, total, mutable_values<S>(loss), mutable_values<S>(metrics));
    };
    if (tokens.logprobs.scalar_type() == torch::headeronly::ScalarType::Double) {
        work(double{});
    } else {
        work(float{});
    }
}

}  // namespace gspo_kernels
