// The command line.

#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "native/problem.h"

namespace infloss::bench {

constexpr const char* kUsage =
    "usage: bench_kernels [options]\n"
    "  --check                only the small shapes, each against the host, untimed\n"
    "  --shape M N D          this shape instead of the default ones\n"
    "  --scale S              logit_scale of the timed shapes (14.2857)\n"
    "  --arithmetic NAME      bf16, f16, tf32 or tf32x3 only\n"
    "  --path NAME            sm80 or sm90 only (all that the device takes)\n"
    "  --pass NAME            lse, grad or step only\n"
    "  --workspace MIB        limit of the kernels' workspace (256)\n"
    "  --cublas PATH          the cuBLAS to compare with\n"
    "  --json FILE            write the rows there too\n"
    "  --help                 this text\n";

struct Shape {
    int64_t m, n, dim;
};

struct Options {
    bool check_only = false;
    bool help = false;
    std::optional<Shape> shape;
    std::optional<float> logit_scale;
    std::optional<Arithmetic> arithmetic;
    std::optional<Path> path;
    std::optional<Pass> pass;
    int64_t workspace_limit = int64_t{256} << 20;
    std::string cublas, json;
};

// The words after the program's name, one after another; throws std::invalid_argument.
class Arguments {
  public:
    Arguments(int count, char** words) : words_(words + 1, words + count) {}

    bool empty() const { return next_ == words_.size(); }

    // The option that the next values belong to.
    std::string option() {
        option_ = words_[next_++];
        return option_;
    }

    std::string word(const std::string& expected) {
        if (empty()) throw std::invalid_argument(option_ + ": expected " + expected + ", got none");
        return words_[next_++];
    }

    template <class Value>
    Value number() {
        return parsed<Value>("a positive number");
    }
    int64_t integer() { return parsed<int64_t>("a positive integer"); }

    // One of `values`, by its name.
    template <class Values>
    auto choice(const Values& values) {
        std::string names;
        for (const auto value : values)
            names += (names.empty() ? "" : ", ") + std::string(name_of(value));
        const std::string text = word("one of " + names);
        for (const auto value : values)
            if (text == name_of(value)) return value;
        throw std::invalid_argument(option_ + ": expected one of " + names + ", got " + text);
    }

  private:
    // The whole of the next word, finite and above 0.
    template <class Value>
    Value parsed(const std::string& expected) {
        const std::string text = word(expected);
        const char* end = text.data() + text.size();
        Value value{};
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        const bool whole = error == std::errc{} && stop == end;
        if (!whole || !(value > 0 && value <= std::numeric_limits<Value>::max()))
            throw std::invalid_argument(option_ + ": expected " + expected + ", got " + text);
        return value;
    }

    std::vector<std::string> words_;
    std::string option_;
    size_t next_ = 0;
};

inline Shape parse_shape(Arguments& arguments) {
    Shape shape{};
    shape.m = arguments.integer();
    shape.n = arguments.integer();
    shape.dim = arguments.integer();
    return shape;
}

// Bytes.
inline int64_t parse_workspace(Arguments& arguments) {
    constexpr double kMib = 1 << 20, kMost = int64_t{1} << 42;
    const double mib = arguments.number<double>();
    if (mib > kMost)
        throw std::invalid_argument("--workspace: expected at most 2^42 MiB, got " +
                                    std::to_string(mib));
    return static_cast<int64_t>(mib * kMib);
}

inline Options parse(int count, char** words) {
    Arguments arguments(count, words);
    Options options;
    while (!arguments.empty()) {
        const std::string option = arguments.option();
        if (option == "--check") {
            options.check_only = true;
        } else if (option == "--help") {
            options.help = true;
        } else if (option == "--shape") {
            options.shape = parse_shape(arguments);
        } else if (option == "--scale") {
            options.logit_scale = arguments.number<float>();
        } else if (option == "--arithmetic") {
            options.arithmetic = arguments.choice(kArithmetics);
        } else if (option == "--path") {
            options.path = arguments.choice(kPaths);
        } else if (option == "--pass") {
            options.pass = arguments.choice(kPasses);
        } else if (option == "--workspace") {
            options.workspace_limit = parse_workspace(arguments);
        } else if (option == "--cublas") {
            options.cublas = arguments.word("a path");
        } else if (option == "--json") {
            options.json = arguments.word("a path");
        } else {
            throw std::invalid_argument("unknown option " + option + "; --help lists them");
        }
    }
    return options;
}

}  // namespace infloss::bench
