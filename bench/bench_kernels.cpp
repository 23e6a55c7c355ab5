// Checks and times the kernels over S without torch: each row against a CPU loop in double, then
// its speed beside cuBLAS's. A row whose check fails prints no speed. Columns: bench/README.md.
// Exit status: 0 all right, 1 a check failed, 2 wrong usage, 77 no CUDA device.
//
// Built by CMake, or by hand:
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=sm_90a -Icsrc -Ibench
//     bench/bench_kernels.cpp csrc/*.cu csrc/*/*.cu -o build/bench_kernels -ldl

#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/cublas.h"
#include "native/device_problem.h"
#include "native/judge.h"
#include "native/options.h"
#include "native/problem.h"
#include "native/report.h"
#include "native/timer.h"

namespace {

using namespace infloss::bench;
using infloss::Arithmetic;
using infloss::Path;

constexpr int kExitWrong = 1;
constexpr int kExitUsage = 2;
constexpr int kExitSkipped = 77;

// Small and ragged, so that the whole of S can be computed on the host.
std::vector<Case> check_cases(Arithmetic arithmetic) {
    constexpr int64_t kTiny = 64 << 10;  // too little for one panel
    std::vector<Case> cases{
        {.what = "one pair", .m = 1, .n = 1, .dim = 1},
        {.what = "less than a fragment", .m = 3, .n = 5, .dim = 7},
        {.what = "just over a tile", .m = 129, .n = 257, .dim = 72},
        {.what = "hardest negatives", .m = 129, .n = 257, .dim = 72, .hardest = true},
        {.what = "target array",
         .m = 200,
         .n = 200,
         .dim = 64,
         .cols = false,
         .target_array = true},
        {.what = "rows only", .m = 300, .n = 130, .dim = 40, .cols = false},
        {.what = "several tiles", .m = 700, .n = 600, .dim = 136},
        {.what = "not normalised", .m = 257, .n = 129, .dim = 72, .normalised = false},
        {.what = "frozen x", .m = 129, .n = 257, .dim = 72, .want_dx = false},
        {.what = "frozen y", .m = 129, .n = 257, .dim = 72, .want_dy = false, .want_dscale = false},
        {.what = "only the scale",
         .m = 129,
         .n = 257,
         .dim = 72,
         .want_dx = false,
         .want_dy = false},
        {.what = "offset and stride",
         .m = 70,
         .n = 300,
         .dim = 33,
         .target_offset = 7,
         .target_stride = 3},
        {.what = "narrow cone", .m = 200, .n = 200, .dim = 64, .cone = true},
        {.what = "no shared reference", .m = 200, .n = 200, .dim = 64, .logit_scale = 1000},
        {.what = "hardly scaled", .m = 200, .n = 200, .dim = 64, .logit_scale = 0.1f},
        {.what = "many panels", .m = 700, .n = 1100, .dim = 24, .workspace_limit = kTiny},
    };
    for (Case& c : cases) c.arithmetic = arithmetic;
    return cases;
}

std::vector<Case> default_speed_cases() {
    const auto square = [](int64_t batch, int64_t dim, Arithmetic arithmetic) {
        return Case{.what = "timed", .m = batch, .n = batch, .dim = dim, .arithmetic = arithmetic};
    };
    return {
        square(8192, 768, Arithmetic::bf16),   square(32768, 768, Arithmetic::bf16),
        square(65536, 768, Arithmetic::bf16),  square(65536, 512, Arithmetic::bf16),
        square(65536, 1024, Arithmetic::bf16), square(16384, 768, Arithmetic::f16),
        square(16384, 768, Arithmetic::tf32),  square(16384, 768, Arithmetic::tf32x3),
    };
}

std::vector<Case> speed_cases(const Options& options) {
    std::vector<Case> cases = default_speed_cases();
    if (options.shape) {
        const auto [m, n, dim] = *options.shape;
        cases = {{.what = "timed",
                  .m = m,
                  .n = n,
                  .dim = dim,
                  .arithmetic = options.arithmetic.value_or(Arithmetic::bf16)}};
    }
    if (options.arithmetic)
        std::erase_if(cases, [&](const Case& c) { return c.arithmetic != *options.arithmetic; });
    for (Case& c : cases) {
        c.workspace_limit = options.workspace_limit;
        c.logit_scale = options.logit_scale.value_or(c.logit_scale);
    }
    return cases;
}

// The kernel and cuBLAS in turns.
Speed time_pass(DeviceProblem& problem, Pass pass, const Cublas* cublas) {
    size_t turn = 0;
    std::vector<Launch> launches{[&] { problem.run(pass, turn++ % problem.sets()); }};
    if (cublas != nullptr) launches.push_back([&] { cublas->multiply(); });
    const std::vector<Timing> timings = alternate(launches);
    Speed speed{timings[0], {}, problem.sets()};
    if (cublas != nullptr) speed.cublas = timings[1];
    return speed;
}

class Bench {
  public:
    explicit Bench(const Options& options) : options_(options), env_(environment()) {
        if (!options.check_only) load_cublas();
        print_header(env_);
    }

    // One row a case: a step runs every kernel there is.
    void check_small_cases() {
        for (const Arithmetic arithmetic : kArithmetics) {
            if (arithmetic != options_.arithmetic.value_or(arithmetic)) continue;
            for (const Case& c : check_cases(arithmetic))
                run_on_paths(c, {options_.pass.value_or(Pass::step)}, false);
        }
    }

    void time_cases() {
        std::vector<Pass> passes(std::begin(kPasses), std::end(kPasses));
        if (options_.pass) passes = {*options_.pass};
        for (const Case& c : speed_cases(options_)) run_on_paths(c, passes, true);
    }

    // Exit status. Throws where nothing was checked.
    int finish() const {
        if (rows_.empty())
            throw std::runtime_error(
                "no row: this device has no such path, or the path no such "
                "arithmetic");
        if (!options_.json.empty()) write_json(options_.json, env_, rows_);
        int64_t wrong = 0;
        for (const Row& row : rows_) wrong += !row.ok();
        std::printf("# %zu rows, %lld wrong\n", rows_.size(), (long long)wrong);
        return wrong == 0 ? 0 : kExitWrong;
    }

  private:
    void load_cublas() {
        try {
            cublas_ = std::make_unique<Cublas>(options_.cublas);
            cublas_->multiply();
            env_.cublas = cublas_->version();
        } catch (const std::runtime_error& error) {
            cublas_.reset();
            env_.cublas_missing = error.what();
        }
    }

    bool takes(Path path, Arithmetic arithmetic) const {
        if (path != options_.path.value_or(path)) return false;
        const bool half = arithmetic == Arithmetic::bf16 || arithmetic == Arithmetic::f16;
        return path == Path::sm80 || (env_.capability == 90 && half);
    }

    // One problem and its exact results serve every path.
    void run_on_paths(const Case& c, const std::vector<Pass>& passes, bool timed) {
        HostProblem host = make_problem(c);
        Judge judge(host);
        for (const Path path : kPaths) {
            if (!takes(path, c.arithmetic)) continue;
            host.spec.path = path;
            run_case(host, judge, passes, timed);
        }
    }

    void run_case(const HostProblem& host, Judge& judge, const std::vector<Pass>& passes,
                  bool timed) {
        DeviceProblem problem(host);
        if (timed) problem.rotate_past(2 * env_.l2_bytes);
        for (const Pass pass : passes) {
            Row row{host.spec, pass, verify(problem, judge, pass), problem.peak_bytes(pass), {}};
            if (timed && row.ok()) row.speed = time_pass(problem, pass, cublas_.get());
            print_row(row);
            rows_.push_back(std::move(row));
        }
    }

    const Options& options_;
    Environment env_;
    std::unique_ptr<Cublas> cublas_;
    std::vector<Row> rows_;
};

int run(const Options& options) {
    Bench bench(options);
    if (!options.shape || options.check_only) bench.check_small_cases();
    if (!options.check_only) bench.time_cases();
    return bench.finish();
}

}  // namespace

int main(int count, char** words) {
    Options options;
    try {
        options = parse(count, words);
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "bench_kernels: %s\n%s", error.what(), kUsage);
        return kExitUsage;
    }
    if (options.help) {
        std::printf("%s", kUsage);
        return 0;
    }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("no CUDA device: nothing checked\n");
        return kExitSkipped;
    }
    try {
        return run(options);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_kernels: %s\n", error.what());
        return kExitWrong;
    }
}
