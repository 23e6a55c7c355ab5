// Rows as a table on stdout and as JSON.

#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/check.h"
#include "native/cublas.h"
#include "native/judge.h"
#include "native/problem.h"
#include "native/timer.h"

namespace infloss::bench {

struct Environment {
    std::string device;
    int capability;  // 90 is 9.0
    int multiprocessors;
    size_t l2_bytes;
    int driver, runtime;         // as CUDA counts versions: 13000 is 13.0
    std::optional<int> cublas;   // its version
    std::string cublas_missing;  // or why there is none
};

inline Environment environment() {
    int device = 0;
    Environment out{};
    cudaDeviceProp properties;
    INFLOSS_CUDA_CHECK(cudaGetDevice(&device));
    INFLOSS_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    INFLOSS_CUDA_CHECK(cudaDriverGetVersion(&out.driver));
    INFLOSS_CUDA_CHECK(cudaRuntimeGetVersion(&out.runtime));
    out.device = properties.name;
    out.capability = 10 * properties.major + properties.minor;
    out.multiprocessors = properties.multiProcessorCount;
    out.l2_bytes = properties.l2CacheSize;
    return out;
}

struct Speed {
    Timing kernel;
    std::optional<Timing> cublas;  // timed in turns with the kernel
    size_t input_sets;
};

struct Row {
    Case spec;
    Pass pass;
    std::vector<Check> checks;
    size_t peak_bytes;
    std::optional<Speed> speed;  // of a right row that was timed

    bool ok() const {
        return std::all_of(checks.begin(), checks.end(), [](const Check& c) { return c.ok(); });
    }
    // The check that came closest to failing, or the first that failed.
    const Check& worst() const {
        return *std::max_element(checks.begin(), checks.end(), [](const Check& a, const Check& b) {
            return a.severity() < b.severity();
        });
    }
};

// One of a row's two speeds, with all that follows from it.
struct Figures {
    double us, tflops, gbps;
    std::optional<double> cublas_tflops, of_cublas;
};

inline Figures figures(const Row& row, double Timing::* kind) {
    const double us = row.speed->kernel.*kind;
    Figures out{us,
                flops_of(row.spec, row.pass) / us / 1e6,
                fewest_bytes_of(row.spec, row.pass) / us / 1e3,
                {},
                {}};
    if (row.speed->cublas) {
        out.cublas_tflops = Cublas::FLOPS / ((*row.speed->cublas).*kind) / 1e6;
        out.of_cublas = out.tflops / *out.cublas_tflops;
    }
    return out;
}

inline std::string version_string(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

inline void print_header(const Environment& env) {
    std::printf("# %s, %d SMs, L2 %.0f MiB, driver %s, runtime %s\n", env.device.c_str(),
                env.multiprocessors, double(env.l2_bytes) / (1 << 20),
                version_string(env.driver).c_str(), version_string(env.runtime).c_str());
    if (!env.cublas_missing.empty()) std::printf("# no cuBLAS: %s\n", env.cublas_missing.c_str());
    std::printf(
        "# check: the one nearest its tolerance. burst, sustained: us | TFLOP/s | GB/s | x cuBLAS\n"
        "%-4s %-6s %-4s %6s %6s %5s %6s %-4s %-20s %-18s %9s | %-32s | %-32s\n",
        "pass", "arith", "path", "M", "N", "D", "scale", "norm", "check", "error / allowed",
        "peak MiB", "burst", "sustained");
}

inline void print_figures(const Figures& f) {
    char of_cublas[16] = "-";
    if (f.of_cublas) std::snprintf(of_cublas, sizeof of_cublas, "%.3f", *f.of_cublas);
    std::printf(" | %10.1f %7.1f %7.1f %5s", f.us, f.tflops, f.gbps, of_cublas);
}

inline void print_row(const Row& row) {
    const Case& c = row.spec;
    const Check& worst = row.worst();
    std::printf("%-4s %-6s %-4s %6lld %6lld %5lld %6.1f %-4s %-20s %7.1e / %7.1e %9.1f",
                name_of(row.pass), name_of(c.arithmetic), name_of(c.path), (long long)c.m,
                (long long)c.n, (long long)c.dim, c.logit_scale, c.normalised ? "yes" : "no",
                worst.what.c_str(), worst.error, worst.tolerance,
                double(row.peak_bytes) / (1 << 20));
    if (!row.ok()) {
        std::printf(" | WRONG (%s)", c.what.c_str());
    } else if (row.speed) {
        print_figures(figures(row, &Timing::burst_us));
        print_figures(figures(row, &Timing::sustained_us));
    } else {
        std::printf(" | ok (%s)", c.what.c_str());
    }
    std::printf("\n");
    std::fflush(stdout);
}

// A JSON object, built field by field.
class JsonObject {
  public:
    JsonObject& raw(const std::string& key, const std::string& value) {
        text_ += (text_.empty() ? "" : ", ") + quoted(key) + ": " + value;
        return *this;
    }
    JsonObject& text(const std::string& key, const std::string& value) {
        return raw(key, quoted(value));
    }
    JsonObject& boolean(const std::string& key, bool value) {
        return raw(key, value ? "true" : "false");
    }
    JsonObject& number(const std::string& key, double value) {
        std::ostringstream out;
        out.precision(9);
        out << value;
        return raw(key, std::isfinite(value) ? out.str() : "null");  // JSON knows no infinity
    }
    std::string str() const { return "{" + text_ + "}"; }

  private:
    static std::string quoted(const std::string& value) {
        std::string out = "\"";
        for (const char c : value) {
            if (c == '"' || c == '\\') out += '\\';
            out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
        }
        return out + "\"";
    }

    std::string text_;
};

inline void add_figures(JsonObject& out, const std::string& kind, const Figures& f) {
    out.number(kind + "_us", f.us).number(kind + "_tflops", f.tflops);
    out.number(kind + "_gbps", f.gbps);
    if (!f.of_cublas) return;
    out.number(kind + "_cublas_tflops", *f.cublas_tflops);
    out.number(kind + "_of_cublas", *f.of_cublas);
}

inline std::string to_json(const Row& row) {
    const Case& c = row.spec;
    JsonObject out, checks;
    for (const Check& check : row.checks) {
        JsonObject one;
        one.number("error", check.error).number("tolerance", check.tolerance);
        checks.raw(check.what, one.str());
    }
    out.text("pass", name_of(row.pass)).text("arithmetic", name_of(c.arithmetic));
    out.text("path", name_of(c.path));
    out.number("m", c.m).number("n", c.n).number("dim", c.dim);
    out.number("logit_scale", c.logit_scale).boolean("normalised", c.normalised);
    out.boolean("cols", c.cols).text("what", c.what).number("workspace_limit", c.workspace_limit);
    out.text("status", row.ok() ? "ok" : "WRONG").raw("checks", checks.str());
    out.number("peak_mib", double(row.peak_bytes) / (1 << 20));
    if (row.ok() && row.speed) {
        out.number("input_sets", row.speed->input_sets);
        add_figures(out, "burst", figures(row, &Timing::burst_us));
        add_figures(out, "sustained", figures(row, &Timing::sustained_us));
    }
    return out.str();
}

inline void write_json(const std::string& path, const Environment& env,
                       const std::vector<Row>& rows) {
    JsonObject where;
    where.text("device", env.device).number("multiprocessors", env.multiprocessors);
    where.number("l2_bytes", env.l2_bytes).number("driver", env.driver);
    where.number("runtime", env.runtime);
    if (env.cublas) where.number("cublas", *env.cublas);
    std::ofstream file(path);
    file << "{\"schema\": 1, \"environment\": " << where.str() << ",\n \"rows\": [";
    for (size_t i = 0; i < rows.size(); ++i)
        file << (i == 0 ? "\n  " : ",\n  ") << to_json(rows[i]);
    file << "\n ]}\n";
    file.close();
    if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace infloss::bench
