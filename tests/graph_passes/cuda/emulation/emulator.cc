// Runs CUDA kernels on the CPU and checks each access to memory. Blocks run one after the other; a block's threads are
// fibers, so a barrier or a warp's exchange really waits for the other threads.
//
// Kernels are compiled with -fsanitize=thread, which calls __tsan_read4 and the like before each access; the functions of
// these names here find accesses outside of buffers, and races: two threads access the same bytes, one of them writes,
// and no barrier lies between them. -fsanitize=bounds,alignment call the __ubsan functions.
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace {

// --- memory ---

enum Kind : uint8_t { READ, WRITE, ATOMIC };
constexpr size_t GRANULE = 2;  // bytes that one `Shadow` stands for

// Who accessed a granule last.
struct Access {
    uint32_t block;             // counted over all launches, from 1
    uint32_t era;               // barriers that the block had passed
    uint16_t thread, warp_era;  // barriers that its warp had passed
    uint8_t bytes;              // which of the granule, as bits
    Kind kind;
    bool several;  // another thread of the same block and era, or of another block, has read too
};
struct Shadow { Access write, read; };

struct Region {
    char *begin, *end;
    bool is_shared;
    // One for each granule, in the running launch. Made at the first access, from pages of zeros: untouched pages take no
    // memory.
    std::unique_ptr<Shadow[], decltype(&free)> shadows{nullptr, &free};
    std::vector<char> before;  // its contents before the launch, if it is written to

    Region(char *begin, size_t bytes, bool is_shared) : begin(begin), end(begin + bytes), is_shared(is_shared) {}
};
std::map<char *, Region> regions;  // by their ends
Region *latest = nullptr;

struct Permit { char *begin; size_t bytes, may_write; };
std::vector<Permit> permits;  // what the next launch may access; if there are none, every buffer

Region *region_of(char *address) {
    if (latest && address >= latest->begin && address < latest->end) return latest;
    const auto found = regions.upper_bound(address);
    return latest = found != regions.end() && address >= found->second.begin ? &found->second : nullptr;
}

// --- threads ---

enum State : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };
constexpr size_t STACK_BYTES = 128 << 10;

struct Fiber {
    char *stack = nullptr;
    bool has_begun = false;
    jmp_buf context;
    ucontext_t start;
    uint3 thread;
    State state;
    unsigned mask;  // of a warp's exchange
    unsigned long long value;
    int source, is;
};
std::vector<Fiber> fibers;
std::vector<uint32_t> warp_eras;
Fiber *current = nullptr;
jmp_buf scheduler;
uint3 block, block_size, grid_size;
uint32_t num_threads, serial = 0, first_serial, era;
bool has_met_others;  // whether the block has done an atomic operation, as which it knows what earlier blocks wrote
std::vector<char> dynamic_shared;
char *image_begin, *image_end;  // the kernel's code and constants
void (*entry)(void **);
void **arguments;
std::string problem;
void *problem_at;

uint32_t number(const Fiber &fiber) { return &fiber - fibers.data(); }

void pause() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

std::string place(uint3 at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

std::string thread_named(uint32_t number) { return "thread " + place(fibers[number].thread); }

// Ends the launch.
[[noreturn]] void fail(const std::string &what, void *at = nullptr) {
    problem = "block " + place(block) + ", " + thread_named(number(*current)) + " " + what;
    problem_at = at;
    _longjmp(scheduler, 1);
}

void body() {
    for (;;) {  // a launch or block after the other
        entry(arguments);
        current->state = DONE;
        pause();
    }
}

void resume(Fiber &fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.has_begun) _longjmp(fiber.context, 1);
    fiber.has_begun = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack;
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.start, body, 0);
    setcontext(&fiber.start);
}

// Lets go on whom nobody is to be waited for any more. Returns whether there was one.
bool release() {
    bool any = false;
    for (uint32_t first = 0; first < num_threads; first += 32) {
        const uint32_t lanes = std::min(32u, num_threads - first);
        Fiber *const warp = &fibers[first];
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            const unsigned mask = warp[lane].mask;
            if (warp[lane].state != AT_WARP) continue;
            unsigned waiting = 0, votes = 0;
            unsigned long long values[32];
            for (uint32_t other = 0; other < lanes; ++other)
                if (warp[other].state == AT_WARP && warp[other].mask == mask) {
                    waiting |= 1u << other;
                    votes |= (warp[other].value != 0) << other;
                    values[other] = warp[other].value;
                }
            if (waiting != mask) continue;
            for (uint32_t other = 0; other < lanes; ++other)
                if (mask >> other & 1) {
                    const int source = warp[other].source;
                    warp[other].value = source < 0 ? votes : values[source];
                    warp[other].state = READY;
                }
            if (warp[lane].source == -2) ++warp_eras[first / 32];  // nothing else orders accesses to memory
            any = true;
        }
    }
    int waiting = 0, is = 0;
    for (uint32_t i = 0; i < num_threads; ++i) {
        if (fibers[i].state == DONE) continue;
        if (fibers[i].state != AT_BARRIER) return any;
        is |= fibers[i].is;
        ++waiting;
    }
    for (uint32_t i = 0; i < num_threads; ++i)
        if (fibers[i].state == AT_BARRIER) {
            fibers[i].is = is;
            fibers[i].state = READY;
        }
    if (waiting) ++era;
    return any || waiting;
}

// The threads or blocks 0 to count - 1 in the order 'f'orward, 'r'everse, or by chance.
void arrange(std::vector<uint32_t> &numbers, uint32_t count, char order, std::mt19937 &chance) {
    numbers.resize(count);
    for (uint32_t i = 0; i < count; ++i) numbers[i] = order == 'r' ? count - 1 - i : i;
    if (order == 'x') std::shuffle(numbers.begin(), numbers.end(), chance);
}

void run_block(char order, std::mt19937 &chance) {
    ++serial;
    era = 0;
    has_met_others = false;
    std::fill(warp_eras.begin(), warp_eras.end(), 0);
    for (auto &each : regions)  // whatever an earlier block has left there
        if (each.second.is_shared) memset(each.second.begin, 0xff, each.second.end - each.second.begin);
    for (uint32_t i = 0; i < num_threads; ++i) fibers[i].state = READY;
    std::vector<uint32_t> turns;
    for (;;) {
        arrange(turns, num_threads, order, chance);
        for (const uint32_t i : turns) {
            if (fibers[i].state != READY) continue;
            resume(fibers[i]);
            if (!problem.empty()) return;
        }
        if (release()) continue;
        for (uint32_t i = 0; i < num_threads; ++i)
            if (fibers[i].state != DONE) {
                current = &fibers[i];
                const char *const what = current->state == AT_WARP ? "an exchange of its warp" : "a barrier";
                problem = "block " + place(block) + ", " + thread_named(i) + " waits for ever at " + what +
                          ": not all threads that it waits for come there";
                return;
            }
        return;
    }
}

// `since`: the first block whose accesses count.
bool conflicts(const Access &with, uint8_t bytes, Kind kind, uint32_t since) {
    if (with.block < since || !(with.bytes & bytes) || (with.kind == ATOMIC && kind == ATOMIC)) return false;
    if (with.block != serial) return !has_met_others;
    if (with.era != era) return false;
    if (with.several) return true;
    const uint32_t own = number(*current);
    return with.thread != own && (with.thread / 32 != own / 32 || with.warp_era == warp_eras[own / 32]);
}

[[noreturn]] void fail_in_race(const Access &with, const char *before, const char *now, size_t bytes, void *at) {
    const std::string who = with.block != serial ? "another block" : with.several ? "other threads" : thread_named(with.thread);
    fail(std::string("races: it ") + now + " " + std::to_string(bytes) + " bytes that " + who + " " + before +
         (with.block == serial ? ", with no barrier between" : " in the same launch"), at);
}

void check(const void *address, size_t bytes, Kind kind, void *at) {
    char *const begin = (char *)address;
    if (!current || (begin >= current->stack && begin < current->stack + STACK_BYTES)) return;
    const char *const does = kind == READ ? "reads" : "writes";
    Region *const region = region_of(begin);
    if (!region) {
        if (kind == READ && begin >= image_begin && begin < image_end) return;
        fail(std::string(does) + " " + std::to_string(bytes) + " bytes outside of every buffer", at);
    }
    if (begin + bytes > region->end) fail(std::string(does) + " beyond the end of a buffer", at);
    if (!region->is_shared && !permits.empty() &&
        std::none_of(permits.begin(), permits.end(), [=](const Permit &permit) {
            return begin >= permit.begin && begin + bytes <= permit.begin + permit.bytes && (kind == READ || permit.may_write);
        }))
        fail(std::string(does) + " memory that is no such operand of its launch", at);
    if (kind != READ && !region->is_shared && region->before.empty()) region->before.assign(region->begin, region->end);
    if (!region->shadows)
        region->shadows.reset((Shadow *)calloc((region->end - region->begin + GRANULE - 1) / GRANULE, sizeof(Shadow)));
    const uint32_t own = number(*current), since = region->is_shared ? serial : first_serial;
    for (size_t from = begin - region->begin, end = from + bytes; from < end; from = (from / GRANULE + 1) * GRANULE) {
        Shadow &shadow = region->shadows[from / GRANULE];
        const uint8_t mask = end - from >= GRANULE && from % GRANULE == 0 ? 3 : from % GRANULE ? 2 : 1;
        if (conflicts(shadow.write, mask, kind, since)) fail_in_race(shadow.write, "has written", does, bytes, at);
        Access now{serial, era, uint16_t(own), uint16_t(warp_eras[own / 32]), mask, kind, false};
        if (kind != READ) {
            if (conflicts(shadow.read, mask, kind, since)) fail_in_race(shadow.read, "has read", does, bytes, at);
            shadow.write = now;
        } else if (shadow.read.block >= since && (shadow.read.block != serial || shadow.read.era == era)) {
            Access &read = shadow.read;  // another may have read since the last barrier
            read.bytes |= mask;
            read.several |= read.block != serial || read.thread != own;
        } else {
            shadow.read = now;
        }
    }
}

// One pass over the grid.
void run(char order, std::mt19937 &chance) {
    first_serial = serial + 1;
    std::vector<uint32_t> blocks;
    arrange(blocks, grid_size.x * grid_size.y * grid_size.z, order, chance);
    for (const uint32_t i : blocks) {
        block = {i % grid_size.x, i / grid_size.x % grid_size.y, i / grid_size.x / grid_size.y};
        run_block(order, chance);
        if (!problem.empty()) return;
    }
}

}  // namespace

// --- what kernels call ---

extern "C" {

uint3 emulated_thread() { return current->thread; }
uint3 emulated_block() { return block; }
uint3 emulated_block_size() { return block_size; }
uint3 emulated_grid_size() { return grid_size; }
void *emulated_shared() { return (void *)((uintptr_t(dynamic_shared.data()) + 1023) & ~uintptr_t(1023)); }

int emulated_barrier(int is) {
    current->is = is;
    current->state = AT_BARRIER;
    pause();
    return current->is;
}

unsigned long long emulated_warp(unsigned mask, unsigned long long value, int source) {
    const uint32_t lane = number(*current) % 32;
    if (!(mask >> lane & 1)) fail("is no part of the mask of its exchange", __builtin_return_address(0));
    if (source >= 0 && !(mask >> source & 1)) fail("reads a lane outside of the mask", __builtin_return_address(0));
    current->mask = mask;
    current->value = value;
    current->source = source;
    current->state = AT_WARP;
    pause();
    return current->value;
}

void emulated_atomic(const void *address, size_t bytes) {
    has_met_others = true;
    check(address, bytes, ATOMIC, __builtin_return_address(0));
}

void emulated_refusal(const char *instruction) {
    fail(std::string("executes ") + instruction + ", which is not emulated", __builtin_return_address(0));
}

#define TSAN(name, bytes, kind) \
    void __tsan_##name(void *at) { check(at, bytes, kind, __builtin_return_address(0)); }
#define TSAN_SIZES(bytes)                       \
    TSAN(read##bytes, bytes, READ)              \
    TSAN(write##bytes, bytes, WRITE)            \
    TSAN(unaligned_read##bytes, bytes, READ)    \
    TSAN(unaligned_write##bytes, bytes, WRITE)  \
    TSAN(volatile_read##bytes, bytes, READ)     \
    TSAN(volatile_write##bytes, bytes, WRITE)
TSAN_SIZES(1)
TSAN_SIZES(2)
TSAN_SIZES(4)
TSAN_SIZES(8)
TSAN_SIZES(16)
void __tsan_read_range(void *at, size_t bytes) { check(at, bytes, READ, __builtin_return_address(0)); }
void __tsan_write_range(void *at, size_t bytes) { check(at, bytes, WRITE, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

struct SourceLocation { const char *file; uint32_t line, column; };
void __ubsan_handle_out_of_bounds(SourceLocation *where, uintptr_t index) {
    fail("takes element " + std::to_string(intptr_t(index)) + " of a smaller array (" + where->file + ":" +
         std::to_string(where->line) + ")");
}
void __ubsan_handle_type_mismatch_v1(SourceLocation *where, uintptr_t address) {
    fail(std::string(address ? "accesses a vector at a misaligned address (" : "accesses a null pointer (") + where->file +
         ":" + std::to_string(where->line) + ")");
}

// --- what Python calls ---

void emulator_add(char *address, size_t bytes) { regions.emplace(address + bytes, Region(address, bytes, false)); }

void emulator_remove(char *address) {
    latest = nullptr;
    for (auto each = regions.begin(); each != regions.end(); ++each)
        if (each->second.begin == address) {
            regions.erase(each);
            return;
        }
}

struct Launch {
    void (*entry)(void **);
    void **arguments;
    char *image_begin, *image_end;
    const Permit *shared, *permits;  // variables in shared memory; operands
    size_t num_shared, num_permits;
    uint3 grid, block;
    uint32_t shared_bytes, seed;
    const char *orders;  // letters, as `arrange` has them; results must be the same in each
};

// Null, or what the kernel does wrong; `at` is then the address of the instruction, or null.
const char *emulator_launch(const Launch *launch, void **at) {
    entry = launch->entry, arguments = launch->arguments;
    image_begin = launch->image_begin, image_end = launch->image_end;
    grid_size = launch->grid, block_size = launch->block;
    num_threads = block_size.x * block_size.y * block_size.z;
    permits.assign(launch->permits, launch->permits + launch->num_permits);
    fibers.reserve(1024);
    for (uint32_t i = fibers.size(); i < num_threads; ++i) {
        fibers.emplace_back();
        fibers[i].stack = (char *)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    for (uint32_t i = 0; i < num_threads; ++i)
        fibers[i].thread = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    warp_eras.resize((num_threads + 31) / 32);
    dynamic_shared.resize(launch->shared_bytes + 1024);
    std::vector<char *> shared;
    const auto share = [&](char *begin, size_t bytes) {
        if (bytes) regions.emplace(begin + bytes, Region(begin, bytes, true)), shared.push_back(begin);
    };
    share((char *)emulated_shared(), launch->shared_bytes);
    for (size_t i = 0; i < launch->num_shared; ++i) share(launch->shared[i].begin, launch->shared[i].bytes);
    problem.clear();
    problem_at = nullptr;
    std::mt19937 chance(launch->seed);
    std::map<Region *, std::vector<char>> results;
    for (const char *order = launch->orders; *order && problem.empty(); ++order) {
        if (order != launch->orders)
            for (auto &each : regions) {
                Region &region = each.second;
                if (region.before.empty()) continue;
                if (!results.count(&region)) results[&region].assign(region.begin, region.end);
                memcpy(region.begin, region.before.data(), region.before.size());
            }
        run(*order, chance);
        for (auto &each : results)
            if (problem.empty() && memcmp(each.first->begin, each.second.data(), each.second.size()))
                problem = "its results depend on the order in which threads and blocks run";
    }
    for (auto &each : regions) each.second.before = {}, each.second.shadows.reset();
    for (char *begin : shared) emulator_remove(begin);
    if (!problem.empty())
        for (Fiber &fiber : fibers) fiber.has_begun = false;  // they have stopped somewhere
    current = nullptr;
    *at = problem_at;
    return problem.empty() ? nullptr : problem.c_str();
}

}  // extern "C"
