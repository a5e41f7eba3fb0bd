#include "launcher.h"

#include <cstring>

#include <dlfcn.h>

namespace triton_cpu {

thread_local LaunchList* recorder = nullptr;

namespace {

// A grid below this runs on the launching thread. Sharing one costs a microsecond or two; waking a worker added about
// 15 us to grids of 10 us and paid from 30 us on (two busy cores, where half of that is won back).
constexpr float kShareNs = 4'000;
constexpr float kWakeNs = 25'000;

std::atomic<Team*> team{nullptr};
std::atomic<uint64_t> shared_launches{0};

// The child of a fork has none of its parent's threads, and perhaps a lock that nobody will open: it starts afresh.
void forget_team() { team.store(nullptr); }

Team& current_team() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_team);
    (void)registered;
    Team* current = team.load();
    if (current) return *current;
    // Never deleted: its workers wait in it until the process ends.
    Team* created = new Team;
    if (team.compare_exchange_strong(current, created)) return *created;
    delete created;
    return *current;
}

float run_shared(Team& team, const Work& work, int64_t first, int threads) {
    shared_launches.fetch_add(1, std::memory_order_relaxed);
    return team.run(work, first, threads);
}

float run_alone(const Work& work, int64_t first) {
    int64_t start = now_ns();
    work.run(first, work.grid.size());
    return float(now_ns() - start) / float(work.grid.size() - first);
}

// What a grid is expected to take on one thread; a kernel never seen counts as long.
float expected_ns(const Kernel& kernel, int64_t programs) {
    float program_ns = kernel.program_ns.load(std::memory_order_relaxed);
    return program_ns == 0.0f ? kWakeNs : program_ns * float(programs);
}

bool worth_sharing(const Kernel& kernel, int64_t programs, float least_ns, int threads) {
    return threads > 1 && programs > 1 && expected_ns(kernel, programs) >= least_ns;
}

}  // namespace

void Kernel::learn(float measured_ns) {
    if (measured_ns <= 0.0f) return;
    float known = program_ns.load(std::memory_order_relaxed);
    float updated = known == 0.0f ? measured_ns : (known + measured_ns) / 2;
    // A launch that the machine interrupted looks long: it takes several in a row to be believed.
    if (known != 0.0f) updated = std::min(updated, 2 * known);
    program_ns.store(updated, std::memory_order_relaxed);
}

void release(Kernel* kernel) {
    if (kernel->references.fetch_sub(1) != 1) return;
    dlclose(kernel->library);
    delete kernel;
}

LaunchList::~LaunchList() {
    for (const Launch& launch : launches) release(launch.kernel);
}

void LaunchList::append(Kernel* kernel, const uint64_t* slots, size_t count, Grid grid) {
    if (grid.size() == 0) return;
    kernel->references.fetch_add(1);
    launches.push_back({kernel, arguments.size(), grid});
    arguments.insert(arguments.end(), slots, slots + count);
    if (int32_t(count) == kernel->checked_arguments) {
        // Addresses alone have no extent: each is said to be unknown.
        arguments.insert(arguments.end(), count, 2 * count);
        arguments.push_back(uint64_t(-1));
    }
}

void LaunchList::extend(const LaunchList& other, size_t first, size_t last) {
    last = std::min(last, other.launches.size());
    if (first >= last) return;
    size_t begin = other.launches[first].first_argument;
    size_t end = last < other.launches.size() ? other.launches[last].first_argument : other.arguments.size();
    for (size_t number = first; number < last; ++number) {
        const Launch& launch = other.launches[number];
        launch.kernel->references.fetch_add(1);
        launches.push_back({launch.kernel, arguments.size() + launch.first_argument - begin, launch.grid});
    }
    arguments.insert(arguments.end(), other.arguments.begin() + begin, other.arguments.begin() + end);
}

void LaunchList::replay(int threads, Report* report) const {
    Team& team = current_team();
    std::unique_lock<std::mutex> ownership(team.owner, std::try_to_lock);
    if (!ownership.owns_lock()) threads = 1;
    // One waking serves the whole list.
    float total_ns = 0.0f;
    for (const Launch& launch : launches) total_ns += expected_ns(*launch.kernel, launch.grid.size());
    float least_ns = team.asleep() && total_ns < kWakeNs ? kWakeNs : kShareNs;
    for (const Launch& launch : launches) {
        Work work = launch.kernel->work(arguments.data() + launch.first_argument, launch.grid, report);
        bool share = worth_sharing(*launch.kernel, launch.grid.size(), least_ns, threads);
        launch.kernel->learn(share ? run_shared(team, work, 0, threads) : run_alone(work, 0));
        if (work.report && tcpu::failed(report)) return;
    }
}

int64_t run_if_short(Kernel& kernel, const uint64_t* arguments, Grid grid, Report* report) {
    int64_t programs = grid.size();
    float program_ns = kernel.program_ns.load(std::memory_order_relaxed);
    if (program_ns == 0.0f || program_ns * float(programs) >= kShareNs) return 0;
    Work work = kernel.work(arguments, grid, report);
    int64_t start = now_ns();
    int64_t ran = 0, elapsed = 0;
    for (int64_t step = (programs + 1) / 2; ran < programs && elapsed < 2 * int64_t(kShareNs);) {
        int64_t next = ran + step < programs ? ran + step : programs;
        work.run(ran, next);
        ran = next;
        elapsed = now_ns() - start;
    }
    kernel.learn(float(elapsed) / float(ran));
    return ran;
}

void run(Kernel& kernel, const uint64_t* arguments, Grid grid, int64_t first, int threads, Report* report) {
    Work work = kernel.work(arguments, grid, report);
    Team& team = current_team();
    float least_ns = team.asleep() ? kWakeNs : kShareNs;
    if (worth_sharing(kernel, grid.size() - first, least_ns, threads)) {
        std::unique_lock<std::mutex> ownership(team.owner, std::try_to_lock);
        if (ownership.owns_lock()) return kernel.learn(run_shared(team, work, first, threads));
    }
    kernel.learn(run_alone(work, first));
}

}  // namespace triton_cpu

using namespace triton_cpu;

extern "C" {

// Opens a compiled kernel. Null with a message of at most `error_size` bytes where that fails.
Kernel* triton_cpu_load(const char* path, const char* name, char* error, size_t error_size) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void* function = library ? dlsym(library, name) : nullptr;
    if (!function) {
        const char* reason = dlerror();
        std::snprintf(error, error_size, "%s", reason ? reason : "unknown error");
        if (library) dlclose(library);
        return nullptr;
    }
    bool can_fail = dlsym(library, (std::string(name) + "_can_fail").c_str()) != nullptr;
    auto* checked = static_cast<const int32_t*>(dlsym(library, (std::string(name) + "_checked_arguments").c_str()));
    return new Kernel{reinterpret_cast<KernelFunction>(function), library, can_fail, checked ? *checked : -1};
}

void triton_cpu_release(Kernel* kernel) { release(kernel); }

// Whether the kernel failed; the report then says why.
bool triton_cpu_launch(Kernel* kernel, const uint64_t* slots, size_t count, int32_t x, int32_t y, int32_t z, int threads,
                       Report* report) {
    clear(*report);
    Grid grid{x, y, z};
    if (grid.size() == 0) return false;
    if (recorder) {
        recorder->append(kernel, slots, count, grid);
        return false;
    }
    int64_t ran = run_if_short(*kernel, slots, grid, report);
    if (ran < grid.size()) run(*kernel, slots, grid, ran, threads, report);
    return tcpu::failed(report);
}

// How many launches of this process ran over a team.
uint64_t triton_cpu_shared_launches() { return shared_launches.load(); }

LaunchList* triton_cpu_list_new() { return new LaunchList; }

void triton_cpu_list_delete(LaunchList* list) { delete list; }

size_t triton_cpu_list_length(const LaunchList* list) { return list->launches.size(); }

void triton_cpu_list_append(LaunchList* list, Kernel* kernel, const uint64_t* slots, size_t count, int32_t x, int32_t y,
                            int32_t z) {
    list->append(kernel, slots, count, {x, y, z});
}

void triton_cpu_list_extend(LaunchList* list, const LaunchList* other, size_t first, size_t last) {
    list->extend(*other, first, last);
}

// Whether a kernel failed; the report then says why.
bool triton_cpu_list_replay(const LaunchList* list, int threads, Report* report) {
    clear(*report);
    list->replay(threads, report);
    return tcpu::failed(report);
}

LaunchList* triton_cpu_recorder() { return recorder; }

void triton_cpu_record(LaunchList* list) { recorder = list; }

}  // extern "C"
