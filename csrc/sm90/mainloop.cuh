// The Hopper product: a cluster of two CTAs makes 256 x 256 values of A B^T, each CTA 128 rows. One
// thread of the first warpgroup has the copy engine fill a ring of stages; two warpgroups multiply,
// 64 rows each. Both CTAs need the same rows of B: each fetches one half for both.
//
// A stage is made of boxes of 64 lines of 128 bytes. An operand whose lines run along k (K) or
// across it (MN) differs in how its boxes are laid against the product, and in its descriptor.

#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdio>

#include "common/panel.h"
#include "ptx/hopper.cuh"
#include "sm80/element.cuh"

namespace infloss::sm90 {

using sm80::Bf16;
using sm80::F16;

enum class Major { K, MN };

constexpr int CLUSTER = 2;
constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;  // warpgroups
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int WARPS = CONSUMERS * WARPGROUP / WARP;
constexpr int WG_ROWS = 64;
constexpr int BM = CONSUMERS * WG_ROWS;  // rows of a CTA
constexpr int BN = 256;
constexpr int BK = 64;
constexpr int BLOCKS = BN / 8;  // of 8 columns
constexpr int CLUSTER_ROWS = CLUSTER * BM;
constexpr int STAGES = 4;

constexpr int BOX = 64;  // lines, and 16-bit values of a line
constexpr int BOX_BYTES = BOX * 128;
constexpr int A_BOXES = BM / BOX;
constexpr int B_BOXES = BN / BOX;
constexpr int STAGE_BYTES = (A_BOXES + B_BOXES) * BOX_BYTES;

constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// A warp's way out: 16 lines of 128 bytes.
constexpr int STAGING_ROWS = 16;
constexpr int STAGING_BYTES = STAGING_ROWS * 128;

template <class Extra>
struct Shared {
    alignas(1024) char stages[STAGES][STAGE_BYTES];
    alignas(1024) char staging[WARPS][STAGING_BYTES];
    Extra extra[CONSUMERS];
    uint64_t full[STAGES], empty[STAGES];
};

template <class Extra>
constexpr int SHARED_BYTES = sizeof(Shared<Extra>) + 1024;  // and its alignment

template <class Extra>
__device__ __forceinline__ Shared<Extra>& aligned_shared(char* raw) {
    const uint32_t address = ptx::shared_address(raw);
    return *reinterpret_cast<Shared<Extra>*>(raw + (-address & 1023));
}

// Position in the ring of stages.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#ifdef INFLOSS_DEBUG
constexpr int64_t WAIT_LIMIT = int64_t{1} << 24;
#endif

__device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    const uint32_t address = ptx::shared_address(&barrier);
#ifdef INFLOSS_DEBUG
    for (int64_t tries = 0; !ptx::barrier_try_wait(address, parity); ++tries)
        if (tries == WAIT_LIMIT) {
            printf("infloss: barrier %u of block %u: thread %u waited for parity %u in vain\n",
                   address, blockIdx.x, threadIdx.x, parity);
            __trap();
        }
#else
    while (!ptx::barrier_try_wait(address, parity)) {
    }
#endif
}

// Before anything else, by all threads of the cluster.
template <class Extra>
__device__ __forceinline__ void initialise(Shared<Extra>& shared) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            ptx::barrier_init(ptx::shared_address(&shared.full[stage]), 1);
            ptx::barrier_init(ptx::shared_address(&shared.empty[stage]), CLUSTER * WARPS);
        }
        ptx::barrier_init_fence();
    }
    ptx::cluster_sync();
}

// Where the operands of a tile start, for A and B.
struct Origin {
    int a, b;
};

// Box `index` of an operand from `line` on along m or n, for the values of k from `k` on.
template <Major MAJOR, class Load>
__device__ __forceinline__ void load_box(int line, int index, int k, Load load) {
    line += index * BOX;
    MAJOR == Major::K ? load(k, line) : load(line, k);
}

// Fills the ring with one tile's stages; by one thread.
template <Major A, Major B, class Extra>
__device__ __forceinline__ void produce(const CUtensorMap& a, const CUtensorMap& b,
                                        const Origin& line, const Origin& k, int k_tiles,
                                        Shared<Extra>& shared, Ring& ring) {
    constexpr int SHARE = B_BOXES / CLUSTER;
    const int first = ptx::cluster_rank() * SHARE;
    for (int tile = 0; tile < k_tiles; ++tile) {
        wait(shared.empty[ring.stage], ring.parity ^ 1);
        const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
        const uint32_t stage = ptx::shared_address(shared.stages[ring.stage]);
        ptx::barrier_arrive_expecting(full, STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < A_BOXES; ++i)
            load_box<A>(line.a, i, k.a + tile * BK, [&](int column, int row) {
                ptx::tensor_load(stage + i * BOX_BYTES, a, full, column, row);
            });
#pragma unroll
        for (int i = first; i < first + SHARE; ++i)
            load_box<B>(line.b, i, k.b + tile * BK, [&](int column, int row) {
                ptx::tensor_load_multicast(stage + (A_BOXES + i) * BOX_BYTES, b, full, column, row,
                                           (1 << CLUSTER) - 1);
            });
        ring.advance();
    }
}

// Describes an operand's boxes to the tensor cores. The address counts within the CTA: above it, a
// shared address has the CTA's rank.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    constexpr uint32_t WITHIN_CTA = (1 << 18) - 1;
    constexpr uint64_t LEADING = BOX_BYTES >> 4, GROUP_OF_8_LINES = 1024 >> 4, SWIZZLE_128 = 1;
    return ((address & WITHIN_CTA) >> 4) | LEADING << 16 | GROUP_OF_8_LINES << 32 |
           SWIZZLE_128 << 62;
}

// Units of 16 bytes from one step of 16 values of k to the next.
template <Major MAJOR>
constexpr int K_STEP = (MAJOR == Major::K ? 16 * 2 : 16 * 128) >> 4;

template <Major A, Major B>
__device__ __forceinline__ void multiply_step(Bf16, float (&acc)[BN / 2], uint64_t a, uint64_t b,
                                              bool add) {
    ptx::wgmma_bf16<A == Major::MN, B == Major::MN>(acc, a, b, add);
}

template <Major A, Major B>
__device__ __forceinline__ void multiply_step(F16, float (&acc)[BN / 2], uint64_t a, uint64_t b,
                                              bool add) {
    ptx::wgmma_f16<A == Major::MN, B == Major::MN>(acc, a, b, add);
}

// Tells both CTAs of the cluster that this warp is done with a stage.
template <class Extra>
__device__ __forceinline__ void release(Shared<Extra>& shared, int stage) {
    const int lane = threadIdx.x % WARP;
    if (lane < CLUSTER) ptx::barrier_arrive_at(ptx::shared_address(&shared.empty[stage]), lane);
}

// acc = A B^T of one tile, by a warpgroup; `meanwhile` runs beside the first two stages' products.
template <class Element, Major A, Major B, class Extra, class Meanwhile>
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], int k_tiles, Shared<Extra>& shared,
                                         Ring& ring, int warpgroup, Meanwhile meanwhile) {
    int previous = 0;
    for (int tile = 0; tile < k_tiles; ++tile) {
        wait(shared.full[ring.stage], ring.parity);
        const uint32_t stage = ptx::shared_address(shared.stages[ring.stage]);
        const uint64_t a = descriptor(stage + warpgroup * BOX_BYTES);
        const uint64_t b = descriptor(stage + A_BOXES * BOX_BYTES);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BK / 16; ++step)
            multiply_step<A, B>(Element{}, acc, a + step * K_STEP<A>, b + step * K_STEP<B>,
                                tile > 0 || step > 0);
        ptx::wgmma_commit();
        if (tile == 1) meanwhile();
        if (tile > 0) {
            ptx::wgmma_wait<1>();
            release(shared, previous);
        }
        previous = ring.stage;
        ring.advance();
    }
    if (k_tiles == 1) meanwhile();
    ptx::wgmma_wait<0>();
    release(shared, previous);
}

// Where a consumer thread's accumulators lie: acc[4 j + 2 h + b] is row `row + 8 h`, column
// `col + 8 j + b` of the CTA's tile.
struct Lane {
    int warpgroup;  // of the consumers
    int thread;     // of the warpgroup
    int warp;       // of the consumers
    int group, quad;

    __device__ __forceinline__ Lane()
        : warpgroup(threadIdx.x / WARPGROUP - 1),
          thread(threadIdx.x % WARPGROUP),
          warp(threadIdx.x / WARP - WARPGROUP / WARP),
          group(threadIdx.x % WARP / 4),
          quad(threadIdx.x % 4) {}

    __device__ __forceinline__ int row(int half) const { return warp * 16 + 8 * half + group; }
    __device__ __forceinline__ int col(int block) const { return 8 * block + 2 * quad; }
    __device__ __forceinline__ void sync_warpgroup() const {
        ptx::named_barrier_sync(1 + warpgroup, WARPGROUP);
    }
};

}  // namespace infloss::sm90
