// A team of threads that runs the programs of a grid.
//
// Programs are claimed in chunks from one counter, by whoever is there: a worker that the machine keeps busy elsewhere
// is not waited for, unless it holds a chunk. The counter carries the launch's number, so that a late worker can claim
// nothing of a later launch by mistake.
//
// Measured on two cores shared with other busy processes, 16 programs of 20 us and of 1 ms together: one thread took
// 23 and 1095 us in the mean, this team 37 and 1137, torch's OpenMP team, whose join waits for every thread, 1581 and
// 8040. Where the worker had a core to itself, 110 us became 58.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../runtime/report.h"

namespace triton_cpu {

using tcpu::Report;
using KernelFunction = void (*)(const uint64_t* arguments, int32_t pid_x, int32_t pid_y, int32_t pid_z, int32_t num_x,
                                int32_t num_y, int32_t num_z);
using FailingKernelFunction = void (*)(const uint64_t* arguments, int32_t pid_x, int32_t pid_y, int32_t pid_z,
                                       int32_t num_x, int32_t num_y, int32_t num_z, Report* report);

struct Grid {
    int32_t x, y, z;
    int64_t size() const { return int64_t(x) * y * z; }
};

// report: of a kernel that can fail, whose function is a FailingKernelFunction; null for the others.
struct Work {
    KernelFunction function;
    const uint64_t* arguments;
    Grid grid;
    Report* report;

    // Runs the programs [first, last), numbered with x fastest; none after one of the launch has failed.
    void run(int64_t first, int64_t last) const {
        if (!report) return each(first, last, [this](int32_t x, int32_t y, int32_t z) {
            function(arguments, x, y, z, grid.x, grid.y, grid.z);
        });
        auto failing = reinterpret_cast<FailingKernelFunction>(function);
        each(first, last, [this, failing](int32_t x, int32_t y, int32_t z) {
            if (!tcpu::failed(report)) failing(arguments, x, y, z, grid.x, grid.y, grid.z, report);
        });
    }

  private:
    template <class Program>
    void each(int64_t first, int64_t last, Program program_at) const {
        int32_t x = int32_t(first % grid.x);
        int32_t y = int32_t(first / grid.x % grid.y);
        int32_t z = int32_t(first / (int64_t(grid.x) * grid.y));
        for (int64_t program = first; program < last; ++program) {
            program_at(x, y, z);
            if (++x == grid.x) {
                x = 0;
                if (++y == grid.y) {
                    y = 0;
                    ++z;
                }
            }
        }
    }
};

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    // Whoever launches holds this; who finds it taken runs its grid alone.
    std::mutex owner;

    // Whether a launch would have to wake or start workers.
    bool asleep() const { return some_sleep_.load(std::memory_order_relaxed) || workers_.load() == 0; }

    // Runs the programs [first, grid size) over at most `threads` threads, the caller among them. The caller owns the
    // team. Returns the nanoseconds that the caller spent on each of its programs, 0 where it ran none.
    float run(const Work& work, int64_t first, int threads) {
        grow(threads - 1);
        int64_t programs = work.grid.size() - first;
        int64_t wanted_chunks = int64_t(threads) * kChunksPerThread;
        work_ = work;
        first_ = first;
        chunk_size_ = programs > wanted_chunks ? (programs + wanted_chunks - 1) / wanted_chunks : 1;
        chunks_ = uint32_t((programs + chunk_size_ - 1) / chunk_size_);
        done_.store(0, std::memory_order_relaxed);
        int limit = std::min(threads - 1, workers_.load());
        launch_number_ = (launch_number_ + 1) & kLaunchMask;
        ticket_.store(launch_number_ << kLaunchShift | uint64_t(limit) << kLimitShift | chunks_);
        if (some_sleep_.exchange(false)) wake();

        int64_t start = now_ns();
        int64_t mine = serve(-1);
        float program_ns = mine ? float(now_ns() - start) / float(mine) : 0.0f;
        for (int spins = 0; done_.load(std::memory_order_acquire) != chunks_; ++spins) {
            // A worker that shares this core needs it to finish its chunk.
            if (spins >= kSpinsBeforeYield) sched_yield();
            relax();
        }
        return program_ns;
    }

  private:
    static constexpr int kChunksPerThread = 8;
    static constexpr int kSpinsBeforeYield = 256;
    static constexpr int kMostWorkers = 4095;
    static constexpr int kLimitShift = 32;
    static constexpr int kLaunchShift = 44;
    static constexpr uint64_t kLaunchMask = (uint64_t(1) << 20) - 1;
    // Launches from Python are 6 us apart, replayed ones less: idle workers stay for the next few, then sleep.
    static constexpr int64_t kSpinNs = 50'000;

    // From the top: the launch's number (20 bits), how many workers may take part (12), chunks not yet claimed (32).
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<bool> some_sleep_{false};
    std::atomic<uint32_t> signal_{0};
    // Written by the owner between launches; read by whoever holds a chunk, whom the owner waits for.
    alignas(64) Work work_{};
    int64_t first_ = 0;
    int64_t chunk_size_ = 1;
    uint32_t chunks_ = 0;
    uint64_t launch_number_ = 0;
    std::atomic<int> workers_{0};

    static bool open_to(int worker, uint64_t ticket) {
        return uint32_t(ticket) != 0 && worker < int(ticket >> kLimitShift & kMostWorkers);
    }

    // Runs chunks until none is left for this worker (-1: the owner). Returns how many programs it ran.
    int64_t serve(int worker) {
        int64_t programs = 0;
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (open_to(worker, ticket)) {
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            int64_t begin = first_ + int64_t(chunks_ - uint32_t(ticket)) * chunk_size_;
            int64_t end = begin + chunk_size_;
            if (end > work_.grid.size()) end = work_.grid.size();
            work_.run(begin, end);
            programs += end - begin;
            done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        return programs;
    }

    void work_forever(int worker) {
        int64_t idle_since = now_ns();
        while (true) {
            if (serve(worker) > 0) idle_since = now_ns();
            for (int spins = 0; spins < 64 && !open_to(worker, ticket_.load(std::memory_order_relaxed)); ++spins) relax();
            if (now_ns() - idle_since > kSpinNs) {
                sleep(worker);
                idle_since = now_ns();
            }
        }
    }

    // The owner stores its ticket and then reads some_sleep_; a worker sets that and then reads the ticket: one of the
    // two sees the other.
    void sleep(int worker) {
        uint32_t seen = signal_.load();
        some_sleep_.store(true);
        if (!open_to(worker, ticket_.load())) wait_for_signal(seen);
    }

#ifdef __linux__
    void wait_for_signal(uint32_t seen) { syscall(SYS_futex, &signal_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }

    void wake() {
        signal_.fetch_add(1);
        syscall(SYS_futex, &signal_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    void wait_for_signal(uint32_t seen) {
        while (signal_.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }

    void wake() { signal_.fetch_add(1); }
#endif

    void grow(int wanted) {
        wanted = std::min(wanted, kMostWorkers);
        if (workers_.load() >= wanted) return;
        // Signals are for Python's own threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (workers_.load() < wanted) {
            try {
                std::thread([this, worker = workers_.load()] { work_forever(worker); }).detach();
            } catch (const std::system_error& error) {
                std::fprintf(stderr, "triton_cpu: no more than %d threads can be started (%s)\n",
                             workers_.load() + 1, error.what());
                break;
            }
            workers_.fetch_add(1);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
};

}  // namespace triton_cpu
