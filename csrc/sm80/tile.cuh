// Tile shapes, and how an operand's tile lies in shared memory.
//
// A stage holds K_BYTES of k from BM rows of A and BN rows of B. An operand whose rows run along k
// (K_MAJOR) takes a line of 128 bytes a row; one whose rows run along m or n (MN_MAJOR) takes a
// line a k. 16-byte chunks are permuted within a line (swizzled), so that neither the copies nor
// the fragment loads meet a bank twice.

#pragma once

#include <cstdint>

#include "sm80/element.cuh"

namespace infloss::sm80 {

enum class Major { K, MN };

constexpr int WARP = 32;
constexpr int CHUNK_BYTES = 16;
constexpr int K_BYTES = 128;
constexpr int K_STEP_BYTES = 32;  // k of one mma, for every element

template <class Element_, int WARPS_M_, int WARPS_N_, int MT_, int STAGES_, int BLOCKS_PER_SM_>
struct TileConfig {
    using Element = Element_;
    using Storage = typename Element::Storage;
    static constexpr int WARPS_M = WARPS_M_;
    static constexpr int WARPS_N = WARPS_N_;
    static constexpr int MT = MT_;  // 16-row blocks of a warp
    static constexpr int NT = 8;    // 8-column blocks of a warp
    static constexpr int STAGES = STAGES_;
    static constexpr int BLOCKS_PER_SM = BLOCKS_PER_SM_;
    static constexpr int THREADS = WARP * WARPS_M * WARPS_N;
    static constexpr int WARP_ROWS = 16 * MT;
    static constexpr int WARP_COLS = 8 * NT;
    static constexpr int BM = WARP_ROWS * WARPS_M;
    static constexpr int BN = WARP_COLS * WARPS_N;
    static constexpr int BK = K_BYTES / sizeof(Storage);
    static constexpr int K_STEPS = K_BYTES / K_STEP_BYTES;
    static constexpr int A_BYTES = BM * K_BYTES;
    static constexpr int STAGE_BYTES = (BM + BN) * K_BYTES;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
};

// Columns of B are dealt to a warp's mma blocks in one of two ways. PLAIN: block j holds columns
// 8 j .. 8 j + 7. GATHERED: each thread's 16 accumulator columns are neighbours, so that it stores
// a coefficient row without a detour through shared memory; only a K_MAJOR B can be read so.
enum class Columns { PLAIN, GATHERED };

// The part of a swizzle that depends on a K_MAJOR line: distinct for 8 consecutive lines and for
// the 8 lines 16 q + 2 j + b (q < 4, b < 2) of a gathered block.
__device__ __forceinline__ int k_major_key(int line) {
    return (line & 1) | ((((line >> 1) ^ (line >> 4)) & 3) << 1);
}

template <class Storage>
__device__ __forceinline__ int mn_major_key(int line) {
    return sizeof(Storage) == 2 ? line & 7 : (line & 3) << 1;
}

// Where a thread's accumulators lie within the CTA's tile.
template <class Tile>
struct Lane {
    int warp_row, warp_col;  // first row and column of the warp
    int group, quad;         // lane / 4 and lane % 4

    __device__ explicit Lane(int thread)
        : warp_row(thread / WARP % Tile::WARPS_M * Tile::WARP_ROWS),
          warp_col(thread / WARP / Tile::WARPS_M * Tile::WARP_COLS),
          group(thread % WARP / 4),
          quad(thread % 4) {}

    // Row of accumulators 2 half and 2 half + 1 of row block m.
    __device__ int row(int m, int half) const { return warp_row + 16 * m + 8 * half + group; }
    // Column of accumulators 0 and 2 (and, one further, of 1 and 3) of column block n.
    template <Columns COLUMNS>
    __device__ int col(int n) const {
        return warp_col + (COLUMNS == Columns::PLAIN ? 8 * n + 2 * quad : 16 * quad + 2 * n);
    }
};

}  // namespace infloss::sm80
