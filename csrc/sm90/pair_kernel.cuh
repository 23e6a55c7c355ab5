// Both passes over S: persistent clusters sweep down strips of a panel's tiles, and an epilogue
// makes of each tile's products what it is there for.

#pragma once

#include "common/pair.cuh"
#include "common/params.h"
#include "sm90/mainloop.cuh"
#include "sm90/sweeps.h"

namespace infloss::sm90 {

template <class Args>
struct PairTask {
    CUtensorMap x, y;
    Panel panel;
    Sweeps sweeps;
    int k_tiles;
    Args args;
};

// A CTA's tile.
struct PairTile {
    int64_t row, col;  // where it starts in S
    int local_row;     // and in the panel
    int strip;
    bool first;  // of its sweep
};

// Calls visit with each tile of this CTA, and enter and leave around each sweep.
template <class Args, class Enter, class Visit, class Leave>
__device__ __forceinline__ void for_each_tile(const PairTask<Args>& task, Enter enter, Visit visit,
                                              Leave leave) {
    const int rank = ptx::cluster_rank();
    const int units = task.sweeps.units();
    for (int index = blockIdx.x / CLUSTER; index < units; index += gridDim.x / CLUSTER) {
        const Sweep sweep = task.sweeps.at(index);
        enter(sweep);
        for (int step = sweep.first; step < sweep.last; ++step) {
            const int local_row = step * CLUSTER_ROWS + rank * BM;
            visit(PairTile{task.panel.row0 + local_row, task.panel.col0 + int64_t{sweep.strip} * BN,
                           local_row, sweep.strip, step == sweep.first});
        }
        leave(sweep);
    }
}

template <class Element, class Epilogue>
__global__ void __launch_bounds__(THREADS, 1)
    pair_kernel(const __grid_constant__ PairTask<typename Epilogue::Args> task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (Epilogue::skips(task.args)) return;
    extern __shared__ char raw[];
    auto& shared = aligned_shared<typename Epilogue::Extra>(raw);
    initialise(shared);
    Ring ring;
    if (threadIdx.x < WARPGROUP) {
        ptx::lower_registers<kProducerRegisters>();
        if (threadIdx.x == 0) {
            for_each_tile(
                task, [](const Sweep&) {},
                [&](const PairTile& tile) {
                    const Origin lines{static_cast<int>(tile.row), static_cast<int>(tile.col)};
                    produce<Major::K, Major::K>(task.x, task.y, lines, {0, 0}, task.k_tiles, shared,
                                                ring);
                },
                [](const Sweep&) {});
        }
        __syncwarp();
    } else {
        ptx::raise_registers<kConsumerRegisters>();
        const Lane lane;
        Epilogue epilogue(task.args, shared, lane);
        for_each_tile(
            task, [&](const Sweep&) { epilogue.enter(); },
            [&](const PairTile& tile) {
                float acc[BN / 2];
                multiply<Element, Major::K, Major::K>(acc, task.k_tiles, shared, ring,
                                                      lane.warpgroup,
                                                      [&] { epilogue.prepare(tile); });
                epilogue.finish(Element{}, acc, tile);
            },
            [&](const Sweep& sweep) { epilogue.leave(sweep); });
        epilogue.close();
    }
    ptx::cluster_sync();
#endif
}

template <class Operation>
__device__ __forceinline__ float reduce_quad(float value, Operation operation) {
    value = operation(value, __shfl_xor_sync(~0u, value, 1));
    return operation(value, __shfl_xor_sync(~0u, value, 2));
}

template <class Operation>
__device__ __forceinline__ float reduce_groups(float value, Operation operation) {
    value = operation(value, __shfl_xor_sync(~0u, value, 4));
    value = operation(value, __shfl_xor_sync(~0u, value, 8));
    return operation(value, __shfl_xor_sync(~0u, value, 16));
}

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Adds up pairs of lanes that differ in bit BIT of their group: each keeps half of its columns.
template <int KEPT, int BIT>
__device__ __forceinline__ void halve_columns(float (&sums)[BLOCKS][2], const Lane& lane) {
    const bool upper = lane.group & BIT;
#pragma unroll
    for (int j = 0; j < KEPT; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const float kept = upper ? sums[j + KEPT][b] : sums[j][b];
            const float sent = upper ? sums[j][b] : sums[j + KEPT][b];
            sums[j][b] = kept + __shfl_xor_sync(~0u, sent, 4 * BIT);
        }
}

// Writes a warp's sums over its 16 rows of each of the tile's columns to [BN] floats.
__device__ __forceinline__ void write_column_sums(float (&sums)[BLOCKS][2], const Lane& lane,
                                                  float* out) {
    constexpr int KEPT = BLOCKS / 8;
    halve_columns<4 * KEPT, 4>(sums, lane);
    halve_columns<2 * KEPT, 2>(sums, lane);
    halve_columns<KEPT, 1>(sums, lane);
#pragma unroll
    for (int j = 0; j < KEPT; ++j)
        *reinterpret_cast<float2*>(out + lane.col(KEPT * lane.group + j)) = {sums[j][0],
                                                                             sums[j][1]};
}

// A thread's two rows of a tile.
struct RowPositions {
    int64_t row[2];
    int target[2];  // column of the tile; none there: -1

    __device__ __forceinline__ RowPositions(const PairParams& p, const PairTile& tile,
                                            const Lane& lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row[h] = tile.row + lane.row(h);
            target[h] = -1;
            if (row[h] >= p.m) continue;
            const int64_t local =
                pair::target_of(row[h], p.target, p.target_offset, p.target_stride) - tile.col;
            if (local >= 0 && local < BN && tile.col + local < p.n)
                target[h] = static_cast<int>(local);
        }
    }
};

// Whether some positive of the warp's rows, or the edge of S, is in the tile.
__device__ __forceinline__ bool is_special(const PairParams& p, const PairTile& tile,
                                           const Lane& lane) {
    const RowPositions rows(p, tile, lane);
    const bool at_edge = tile.row + BM > p.m || tile.col + BN > p.n;
    return __any_sync(~0u, at_edge || rows.target[0] >= 0 || rows.target[1] >= 0);
}

__device__ __forceinline__ float inv_norm_at(const float* inv_norm, int64_t i, int64_t size) {
    if (i >= size) return 0;
    return inv_norm != nullptr ? inv_norm[i] : 1.0f;
}

}  // namespace infloss::sm90
