// The skeleton of a kernel whose warps have different roles: producer warps start TMA loads into a circular buffer of
// stages; consumer warps (the MMA warps) multiply the tiles that have arrived. Each stage has two mbarriers: the bytes
// of a load arrive at `full`, and the consumers arrive at `empty`.
#pragma once
#include "tma.cuh"
#include "warpgroup.cuh"

// Position in a circular buffer of stages, each with its own mbarrier: the stage's index and the parity of its current phase.
struct PipelineState {
    int index = 0;
    uint32 phase = 0;

    __device__ void advance(int stages) {
        if (++index == stages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// A warp's role in a block of TEAMS teams of MMA warps, followed by a producer warp for each team: whether the warp
// multiplies, and the team for which it multiplies or loads. Warps behind the producers have team numbers from TEAMS
// on.
template <int TEAMS> struct WarpRole {
    const bool is_mma_warp;
    const int team;

    __device__ explicit WarpRole(int warp)
        : is_mma_warp(warp < TEAMS * TEAM_WARPS), team(is_mma_warp ? warp / TEAM_WARPS : warp - TEAMS * TEAM_WARPS) {}
};
