// The command line.

#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/problem.h"

namespace infloss::bench {

constexpr const char* kUsage =
    "usage: bench_kernels [options]\n"
    "  --check                only the small shapes, each against the host, untimed\n"
    "  --shape M N D          this shape instead of the default ones\n"
    "  --scale S              logit_scale of the timed shapes (14.2857)\n"
    "  --arithmetic NAME      bf16, f16, tf32 or tf32x3 only\n"
    "  --pass NAME            lse, grad or step only\n"
    "  --workspace MIB        limit of the kernels' workspace (256)\n"
    "  --cublas PATH          the cuBLAS to compare with\n"
    "  --json FILE            write the rows there too\n";

struct Shape {
    int64_t m, n, dim;
};

struct Options {
    bool check_only = false;
    bool help = false;
    std::optional<Shape> shape;
    std::optional<float> logit_scale;
    std::optional<Arithmetic> arithmetic;
    std::optional<Pass> pass;
    int64_t workspace_limit = int64_t{256} << 20;
    std::string cublas, json;
};

// The words after the program's name, one after another; throws std::invalid_argument.
class Arguments {
  public:
    Arguments(int count, char** words) : words_(words + 1, words + count) {}

    bool empty() const { return next_ == words_.size(); }

    std::string word() {
        if (empty()) throw std::invalid_argument("a value is missing after " + words_.back());
        return words_[next_++];
    }

    double number() {
        const std::string text = word();
        size_t used = 0;
        double value = 0;
        try {
            value = std::stod(text, &used);
        } catch (const std::exception&) {
        }
        if (used != text.size() || !(value > 0))
            throw std::invalid_argument(text + " is no positive number");
        return value;
    }

    int64_t integer() { return static_cast<int64_t>(number()); }

    // One of `values`, by its name.
    template <class Values>
    auto choice(const Values& values) {
        const std::string text = word();
        for (const auto value : values)
            if (text == name_of(value)) return value;
        throw std::invalid_argument(text + " is not known");
    }

  private:
    std::vector<std::string> words_;
    size_t next_ = 0;
};

inline Shape parse_shape(Arguments& arguments) {
    Shape shape{};
    shape.m = arguments.integer();
    shape.n = arguments.integer();
    shape.dim = arguments.integer();
    return shape;
}

inline Options parse(int count, char** words) {
    Arguments arguments(count, words);
    Options options;
    while (!arguments.empty()) {
        const std::string option = arguments.word();
        if (option == "--check") {
            options.check_only = true;
        } else if (option == "--help") {
            options.help = true;
        } else if (option == "--shape") {
            options.shape = parse_shape(arguments);
        } else if (option == "--scale") {
            options.logit_scale = static_cast<float>(arguments.number());
        } else if (option == "--arithmetic") {
            options.arithmetic = arguments.choice(kArithmetics);
        } else if (option == "--pass") {
            options.pass = arguments.choice(kPasses);
        } else if (option == "--workspace") {
            options.workspace_limit = static_cast<int64_t>(arguments.number() * (1 << 20));
        } else if (option == "--cublas") {
            options.cublas = arguments.word();
        } else if (option == "--json") {
            options.json = arguments.word();
        } else {
            throw std::invalid_argument("unknown option " + option);
        }
    }
    return options;
}

}  // namespace infloss::bench
