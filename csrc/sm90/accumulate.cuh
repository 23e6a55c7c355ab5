// Backward, second half: a panel of coefficients times the features of the other side, added to
// float32 accumulators by the copy engine. Both gradients' products share a launch.
//
// An accumulator is added to once a launch, so its sum has a fixed order.

#pragma once

#include "sm90/mainloop.cuh"

namespace infloss::sm90 {

// acc [rows, dim] (+)= A B + residuals mean, A [rows, k] a view of the panel.
struct Product {
    CUtensorMap features;      // B [k, dim]
    CUtensorMap acc;           // [rows, dim] of float32
    int feature_row, acc_row;  // where this panel's part of them starts
    const float* residuals;    // [slots, residual_ld]: to be summed over slots; or null
    const float* mean;         // [dim]
    int64_t residual_ld;
    int slots;
    int row_tiles;  // cluster tiles
    int k_tiles;
    bool accumulate;  // add to acc rather than write it
};

struct AccumulateTask {
    CUtensorMap coefficients;  // the panel
    Product x;                 // A = the panel
    Product y;                 // A = its transpose
    int dim, col_tiles;

    __host__ __device__ int units() const { return (x.row_tiles + y.row_tiles) * col_tiles; }
};

struct AccumulateShared {
    float mean[BN];
};

// A CTA's tile of a product.
struct ProductTile {
    int row, col;
};

class Accumulate {
  public:
    using Extra = AccumulateShared;

    __device__ __forceinline__ Accumulate(const AccumulateTask& task, Shared<Extra>& shared,
                                          const Lane& lane)
        : task_(task),
          lane_(lane),
          mean_(shared.extra[lane.warpgroup].mean),
          staging_(ptx::shared_address(shared.staging[lane.warp])) {}

    // Residuals of this thread's rows; the quad shares the slots.
    __device__ __forceinline__ void prepare(const Product& product, const ProductTile& tile) {
        residual_[0] = residual_[1] = 0;
        if (product.residuals == nullptr) return;
        lane_.sync_warpgroup();
        for (int i = lane_.thread; i < BN; i += WARPGROUP)
            mean_[i] = tile.col + i < task_.dim ? product.mean[tile.col + i] : 0;
        lane_.sync_warpgroup();
#pragma unroll 8
        for (int slot = lane_.quad; slot < product.slots; slot += 4) {
            const float* from = product.residuals + slot * product.residual_ld + tile.row;
            residual_[0] += from[lane_.row(0)];
            residual_[1] += from[lane_.row(1)];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            residual_[h] += __shfl_xor_sync(~0u, residual_[h], 1);
            residual_[h] += __shfl_xor_sync(~0u, residual_[h], 2);
        }
    }

    __device__ __forceinline__ void finish(const float (&acc)[BN / 2], const Product& product,
                                           const ProductTile& tile) const {
        constexpr int CHUNK = 4;  // blocks of columns that 128 bytes hold
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int chunk = 0; chunk < BLOCKS; chunk += CHUNK) {
            if (lane == 0) ptx::tensor_store_wait_read();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                const int j = chunk + i;
                float2 mean = {0, 0};
                if (product.residuals != nullptr)
                    mean = *reinterpret_cast<const float2*>(mean_ + lane_.col(j));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = lane_.group + 8 * h;
                    const int position = (2 * i + lane_.quad / 2) ^ lane_.group;
                    ptx::store_shared(staging_ + row * 128 + position * 16 + lane_.quad % 2 * 8,
                                      {fmaf(residual_[h], mean.x, acc[4 * j + 2 * h]),
                                       fmaf(residual_[h], mean.y, acc[4 * j + 2 * h + 1])});
                }
            }
            ptx::async_proxy_fence();
            __syncwarp();
            if (lane == 0) {
                const int col = tile.col + chunk * 8;
                const int row = product.acc_row + tile.row + lane_.warp * 16;
                if (product.accumulate) {
                    ptx::tensor_add(product.acc, staging_, col, row);
                } else {
                    ptx::tensor_store(product.acc, staging_, col, row);
                }
                ptx::tensor_store_commit();
            }
        }
    }

    __device__ __forceinline__ void close() const {
        if (threadIdx.x % WARP == 0) ptx::tensor_store_wait();
    }

  private:
    const AccumulateTask& task_;
    const Lane& lane_;
    float* mean_;
    uint32_t staging_;
    float residual_[2];
};

// Calls visit with each product and tile of this CTA.
template <class VisitX, class VisitY>
__device__ __forceinline__ void for_each_product_tile(const AccumulateTask& task, VisitX visit_x,
                                                      VisitY visit_y) {
    const int rank = ptx::cluster_rank();
    const int units = task.units(), x_units = task.x.row_tiles * task.col_tiles;
    for (int index = blockIdx.x / CLUSTER; index < units; index += gridDim.x / CLUSTER) {
        const int within = index < x_units ? index : index - x_units;
        const ProductTile tile{within / task.col_tiles * CLUSTER_ROWS + rank * BM,
                               within % task.col_tiles * BN};
        index < x_units ? visit_x(tile) : visit_y(tile);
    }
}

template <Major A, class Extra>
__device__ __forceinline__ void produce_product(const AccumulateTask& task, const Product& product,
                                                const ProductTile& tile, Shared<Extra>& shared,
                                                Ring& ring) {
    produce<A, Major::MN>(task.coefficients, product.features, {tile.row, tile.col},
                          {0, product.feature_row}, product.k_tiles, shared, ring);
}

template <class Element>
__global__ void __launch_bounds__(THREADS, 1)
    accumulate_kernel(const __grid_constant__ AccumulateTask task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char raw[];
    auto& shared = aligned_shared<AccumulateShared>(raw);
    initialise(shared);
    Ring ring;
    if (threadIdx.x < WARPGROUP) {
        ptx::lower_registers<kProducerRegisters>();
        if (threadIdx.x == 0) {
            for_each_product_tile(
                task,
                [&](const ProductTile& tile) {
                    produce_product<Major::K>(task, task.x, tile, shared, ring);
                },
                [&](const ProductTile& tile) {
                    produce_product<Major::MN>(task, task.y, tile, shared, ring);
                });
        }
        __syncwarp();
    } else {
        ptx::raise_registers<kConsumerRegisters>();
        const Lane lane;
        Accumulate epilogue(task, shared, lane);
        for_each_product_tile(
            task,
            [&](const ProductTile& tile) {
                float acc[BN / 2];
                multiply<Element, Major::K, Major::MN>(acc, task.x.k_tiles, shared, ring,
                                                       lane.warpgroup,
                                                       [&] { epilogue.prepare(task.x, tile); });
                epilogue.finish(acc, task.x, tile);
            },
            [&](const ProductTile& tile) {
                float acc[BN / 2];
                multiply<Element, Major::MN, Major::MN>(acc, task.y.k_tiles, shared, ring,
                                                        lane.warpgroup,
                                                        [&] { epilogue.prepare(task.y, tile); });
                epilogue.finish(acc, task.y, tile);
            });
        epilogue.close();
    }
    ptx::cluster_sync();
#endif
}

}  // namespace infloss::sm90
