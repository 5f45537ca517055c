// How tiles of cached rows come to where the matrix units read them: by the copy engine, or of E4M3
// through registers. Part of `window.cu`, whose `Shared` and `Arguments` it fills and reads.

#pragma once

// By one warp: brings the tiles of [first, end).
__device__ void bring_tiles(Shared &shared, const Arguments &given, int first, int end) {
    int lane = threadIdx.x % 32;
    const int *page_ids = given.page_ids + given.first_pages[shared.segment];
    int tiles_of_page = given.page_size / TILE;
    int row = 0;
    for (int tile = first; tile < end; tile++) {
        int place = (tile - first) % 32;
        if (place == 0) {
            int mine = min(tile + lane, end - 1);
            row = page_ids[mine / tiles_of_page] * given.page_size + mine % tiles_of_page * TILE;
        }
        int tile_row = __shfl_sync(~0u, row, place);
        int stage = (tile - first) % NUM_STAGES;
        int round = (tile - first) / NUM_STAGES;
        if (lane == 0) {
            if (round > 0) barrier_wait(&shared.empty[stage], (round - 1) & 1);
            barrier_expect(&shared.full[stage], TILE_BYTES);
            for (int block = 0; block < NUM_BLOCKS; block++)
                copy_box(shared.tiles[stage] + block * BLOCK_BYTES, &given.rows, block * 64,
                         tile_row, &shared.full[stage]);
        }
        __syncwarp();
    }
}

// By two warpgroups: the same from rows of E4M3. While a piece of a tile is widened, the same piece
// of a later tile is asked for. Nothing here may wait for what was asked for, as a fence would: who
// reads a tile makes it known to the matrix units.
__device__ void bring_fp8_tiles(Shared &shared, const Arguments &given, int first, int end) {
    static_assert(!IS_FP8 || NUM_PRODUCERS == TILE * 4, "16 columns of each block of a row");
    int thread = threadIdx.x - NUM_CONSUMERS, lane = threadIdx.x % 32;
    int position = thread / 4, piece = thread % 4;
    const int *page_ids = given.page_ids + given.first_pages[shared.segment];
    int tiles_of_page = given.page_size / TILE;
    int lane_row = 0;  // where one of 32 tiles begins
    // Asked for tile after tile.
    auto row_of = [&](int tile) {
        int place = (tile - first) % 32;
        if (place == 0) {
            int mine = min(tile + lane, end - 1);
            lane_row = page_ids[mine / tiles_of_page] * given.page_size +
                       mine % tiles_of_page * TILE;
        }
        long long row = __shfl_sync(~0u, lane_row, place) + position;
        return given.fp8_rows + row * given.fp8_row_bytes + piece * 16;
    };
    // Eight threads store to all of 128 bytes' places: those of a row and of its neighbour.
    int low = position * 128 + (piece * 2 ^ position % 8) * 16;
    int high = position * 128 + (piece * 2 + 1 ^ position % 8) * 16;
    uint4 codes[TILES_AHEAD][NUM_BLOCKS];
#pragma unroll
    for (int ahead = 0; ahead < TILES_AHEAD; ahead++) {
        const unsigned char *row = row_of(first + ahead);
#pragma unroll
        for (int block = 0; block < NUM_BLOCKS; block++)
            codes[ahead][block] = load_once(row + block * 64);
    }
    for (int base = first; base < end; base += TILES_AHEAD) {
#pragma unroll
        for (int ahead = 0; ahead < TILES_AHEAD; ahead++) {
            int tile = base + ahead;
            if (tile >= end) break;
            int stage = (tile - first) % NUM_STAGES;
            int round = (tile - first) / NUM_STAGES;
            const unsigned char *row = row_of(tile + TILES_AHEAD);
            if (round > 0) barrier_wait(&shared.empty[stage], (round - 1) & 1);
            unsigned char *target = shared.tiles[stage];
#pragma unroll
            for (int block = 0; block < NUM_BLOCKS; block++) {
                uint4 code = codes[ahead][block];
                uint2 x = widen(code.x), y = widen(code.y);
                *(uint4 *)(target + block * BLOCK_BYTES + low) = make_uint4(x.x, x.y, y.x, y.y);
                x = widen(code.z), y = widen(code.w);
                *(uint4 *)(target + block * BLOCK_BYTES + high) = make_uint4(x.x, x.y, y.x, y.y);
                if (tile + TILES_AHEAD < end) codes[ahead][block] = load_once(row + block * 64);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.full[stage]);
        }
    }
}
