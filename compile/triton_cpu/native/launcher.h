// Kernels, launches, and lists of launches.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "team.h"

namespace triton_cpu {

// A loaded kernel. Lists of launches hold references of their own: the last one to let go closes the library.
struct Kernel {
    KernelFunction function;
    void* library;
    bool can_fail;
    // Of a kernel with bounds checks: how many arguments it has, without their extents (runtime/bounds.h); else -1.
    int32_t checked_arguments;
    std::atomic<int> references{1};
    // What a program took lately, on one thread; 0 until the first launch.
    std::atomic<float> program_ns{0.0f};

    void learn(float measured_ns);
    Work work(const uint64_t* arguments, Grid grid, Report* report) const {
        return {function, arguments, grid, can_fail ? report : nullptr};
    }
};

void release(Kernel* kernel);

struct LaunchList {
    struct Launch {
        Kernel* kernel;
        size_t first_argument;
        Grid grid;
    };
    std::vector<Launch> launches;
    std::vector<uint64_t> arguments;

    ~LaunchList();
    void append(Kernel* kernel, const uint64_t* slots, size_t count, Grid grid);
    // Adds launches [first, last) of another list.
    void extend(const LaunchList& other, size_t first, size_t last);
    // Ends with the launch that fails.
    void replay(int threads, Report* report) const;
};

// The list that takes this thread's launches instead of the machine, or null.
extern thread_local LaunchList* recorder;

// A report that no launch has failed yet, at the cost of one store.
inline void clear(Report& report) { report.kind = tcpu::NO_FAILURE; }

// Runs a grid that is known to be short, on this thread. Returns how many of its programs ran: 0 where the grid is not
// known to be short, fewer than all where it turned out to be long.
int64_t run_if_short(Kernel& kernel, const uint64_t* arguments, Grid grid, Report* report);

// Runs the programs [first, grid size) over the team, or on this thread where another launch has the team.
void run(Kernel& kernel, const uint64_t* arguments, Grid grid, int64_t first, int threads, Report* report);

}  // namespace triton_cpu
