/* A libnvidia-ml.so.1 whose GPUs are the lines of the file $NVML_STUB, read again when it changes.
 *
 *   count N                 GPUs, UUID GPU-0..N-1; values: util, used (MiB), watts, clock, temp, sm, tensor, dram, fp32 (%)
 *   set GPU KEY VALUE       another value of one GPU: as above, or pid, xid (sent once for each new value), lost 1
 *   mig GPU INSTANCE USED   an instance of 10000 MiB; poison 1: no memory after a MIG sample of GPM
 *   gpm 1                   the GPUs have GPM
 *   hang FUNCTION, error FUNCTION CODE, cost FUNCTION US (processor time)
 *
 * Layouts and return codes are those of nvml.h, as nvidia-ml-py 13.615.71 has them. With -DOLD the functions that came
 * after driver 470 are missing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, BAD = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15, IN_USE = 19 };
enum { GPUS = 16, RULES = 64, INSTANCES = 8 };
typedef unsigned int u32;
typedef unsigned long long u64;

static struct device {
    int gpu, instance; /* -1: the whole GPU */
    double util, used, watts, clock, temp, sm, tensor, dram, fp32, pid, xid, lost;
    double sent;
} whole[GPUS], parts[GPUS][INSTANCES];
static struct rule { char kind, name[64]; long value; } rules[RULES];
static int count, rule_count, has_gpm, poison, poisoned, part_count[GPUS], is_mig[GPUS];
static struct timespec seen;

static void set(struct device *one, const char *key, double value) {
    struct { const char *key; double *at; } keys[] = {
        {"util", &one->util}, {"used", &one->used}, {"watts", &one->watts}, {"clock", &one->clock},
        {"temp", &one->temp}, {"sm", &one->sm}, {"tensor", &one->tensor}, {"dram", &one->dram},
        {"fp32", &one->fp32}, {"pid", &one->pid}, {"xid", &one->xid}, {"lost", &one->lost}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(keys[i].key, key)) *keys[i].at = value;
}

static void load(void) {
    const char *path = getenv("NVML_STUB");
    struct stat about;
    char line[256], word[64], key[64];
    if (!path || stat(path, &about)) exit(70);
    if (about.st_mtim.tv_sec == seen.tv_sec && about.st_mtim.tv_nsec == seen.tv_nsec) return;
    seen = about.st_mtim;
    FILE *file = fopen(path, "r");
    count = rule_count = has_gpm = poison = 0;
    for (int i = 0; i < GPUS; i++) {
        double sent = whole[i].sent;
        memset(&whole[i], 0, sizeof whole[i]);
        whole[i].gpu = i;
        whole[i].instance = -1;
        whole[i].sent = sent;
        part_count[i] = is_mig[i] = 0;
    }
    while (file && fgets(line, sizeof line, file)) {
        int gpu, instance;
        double value;
        long number;
        if (sscanf(line, "count %d", &gpu) == 1) count = gpu;
        else if (sscanf(line, "gpm %d", &gpu) == 1) has_gpm = gpu;
        else if (sscanf(line, "poison %d", &gpu) == 1) poison = gpu;
        else if (sscanf(line, "set %d %63s %lf", &gpu, key, &value) == 3) set(&whole[gpu], key, value);
        else if (sscanf(line, "mig %d %d %lf", &gpu, &instance, &value) == 3) {
            struct device *one = &parts[gpu][part_count[gpu]++];
            is_mig[gpu] = 1;
            *one = whole[gpu];
            one->gpu = gpu;
            one->instance = instance;
            one->used = value;
        } else if (sscanf(line, "migmode %d", &gpu) == 1) is_mig[gpu] = 1;
        else if (sscanf(line, "%63s %63s %ld", key, word, &number) >= 2 &&
                 (!strcmp(key, "hang") || !strcmp(key, "error") || !strcmp(key, "cost"))) {
            struct rule *rule = &rules[rule_count++];
            rule->kind = key[0];
            snprintf(rule->name, sizeof rule->name, "%s", word);
            rule->value = number;
        } else if (sscanf(line, "%63s %lf", key, &value) == 2)
            for (int i = 0; i < GPUS; i++) set(&whole[i], key, value);
    }
    if (file) fclose(file);
}

static double now_s(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static int called(const char *name) {
    load();
    int code = OK;
    for (int i = 0; i < rule_count; i++) {
        if (strcmp(rules[i].name, name)) continue;
        if (rules[i].kind == 'h') for (;;) pause();
        if (rules[i].kind == 'e') code = rules[i].value;
        if (rules[i].kind == 'c')
            for (double end = now_s(CLOCK_THREAD_CPUTIME_ID) + rules[i].value / 1e6; now_s(CLOCK_THREAD_CPUTIME_ID) < end;) {}
    }
    return code;
}

#define ENTER() do { int code = called(__func__); if (code) return code; } while (0)
#define ENTER_GPU(one) do { ENTER(); if ((one)->lost || whole[(one)->gpu].lost) return LOST; } while (0)
#define ONLY_WHOLE(one) do { if ((one)->instance >= 0 || is_mig[(one)->gpu]) return UNSUPPORTED; } while (0)

int nvmlInitWithFlags(u32 flags) { (void)flags; ENTER(); return OK; }
int nvmlShutdown(void) { ENTER(); return OK; }
const char *nvmlErrorString(int code) { static char text[32]; sprintf(text, "stub error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { ENTER(); snprintf(text, size, "580.65.06"); return OK; }
int nvmlDeviceGetCount_v2(u32 *found) { ENTER(); *found = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, struct device **one) {
    ENTER();
    if (index >= (u32)count) return BAD;
    *one = &whole[index];
    return whole[index].lost ? LOST : OK;
}
int nvmlDeviceGetUUID(struct device *one, char *text, u32 size) {
    ENTER_GPU(one);
    if (one->instance < 0) snprintf(text, size, "GPU-%d", one->gpu);
    else snprintf(text, size, "MIG-%d-%d", one->gpu, one->instance);
    return OK;
}
int nvmlDeviceGetName(struct device *one, char *text, u32 size) {
    ENTER_GPU(one);
    snprintf(text, size, "NVIDIA H100 80GB HBM3%s", one->instance < 0 ? "" : " MIG 1c.1g.10gb");
    return OK;
}
int nvmlDeviceGetMinorNumber(struct device *one, u32 *number) { ENTER_GPU(one); *number = one->gpu; return OK; }
int nvmlDeviceGetPciInfo_v3(struct device *one, char *info) {
    ENTER_GPU(one);
    memset(info, 0, 68);
    sprintf(info + 36, "00000000:%02X:00.0", one->gpu + 16);
    return OK;
}
int nvmlDeviceGetMaxClockInfo(struct device *one, int kind, u32 *mhz) { (void)kind; ENTER_GPU(one); *mhz = 1980; return OK; }
int nvmlDeviceGetClockInfo(struct device *one, int kind, u32 *mhz) { (void)kind; ENTER_GPU(one); *mhz = one->clock; return OK; }
int nvmlDeviceGetUtilizationRates(struct device *one, u32 *rates) {
    ENTER_GPU(one);
    ONLY_WHOLE(one);
    rates[0] = one->util;
    rates[1] = one->dram;
    return OK;
}
int nvmlDeviceGetPowerUsage(struct device *one, u32 *mw) { ENTER_GPU(one); *mw = one->watts * 1000; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(struct device *one, u64 *mj) {
    ENTER_GPU(one);
    *mj = one->watts * 1000 * now_s(CLOCK_BOOTTIME);
    return OK;
}
int nvmlDeviceGetTemperature(struct device *one, int kind, u32 *degrees) { (void)kind; ENTER_GPU(one); *degrees = one->temp; return OK; }
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *one, u64 *bits) { ENTER_GPU(one); *bits = 4; return OK; }
static int memory(struct device *one, u64 *total, u64 *used) {
    if (poisoned && is_mig[one->gpu]) return IN_USE;
    *total = (one->instance < 0 ? 81559ull : 10000ull) << 20;
    *used = (u64)(one->used * 1048576);
    return OK;
}
int nvmlDeviceGetMemoryInfo(struct device *one, u64 *info) {
    ENTER_GPU(one);
    int code = memory(one, info, info + 2);
    if (!code) info[1] = info[0] - info[2] - (559ull << 20);
    return code;
}
int nvmlEventSetCreate(void **events) { ENTER(); *events = whole; return OK; }
int nvmlDeviceRegisterEvents(struct device *one, u64 kinds, void *events) { (void)kinds; (void)events; ENTER_GPU(one); return OK; }
struct event { struct device *one; u64 kind, code; u32 gpu_instance, compute_instance; };
int nvmlEventSetWait_v2(void *events, struct event *event, u32 ms) {
    (void)events, (void)ms;
    ENTER();
    for (int i = 0; i < count; i++)
        if (whole[i].xid != whole[i].sent) {
            whole[i].sent = whole[i].xid;
            *event = (struct event){&whole[i], 8, whole[i].xid, -1, -1};
            return OK;
        }
    return TIMEOUT;
}
int nvmlDeviceGetMigMode(struct device *one, u32 *now, u32 *next) { ENTER_GPU(one); *now = *next = is_mig[one->gpu]; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(struct device *one, u32 *most) { ENTER_GPU(one); *most = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *one, u32 index, struct device **part) {
    ENTER_GPU(one);
    if (index >= (u32)part_count[one->gpu]) return NOT_FOUND;
    *part = &parts[one->gpu][index];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(struct device *one, u32 *id) { ENTER_GPU(one); *id = one->instance; return OK; }
struct process { u32 pid; u64 bytes; u32 gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v2(struct device *one, u32 *size, struct process *found) {
    ENTER_GPU(one);
    u32 needed = one->pid != 0, given = *size;
    *size = needed;
    if (given < needed) return TOO_SMALL;
    if (needed) *found = (struct process){one->pid, 1 << 20, -1, -1};
    return OK;
}

#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *one, u32 *size, struct process *found) {
    ENTER();
    return nvmlDeviceGetComputeRunningProcesses_v2(one, size, found);
}
int nvmlDeviceGetCurrentClocksEventReasons(struct device *one, u64 *bits) { ENTER_GPU(one); *bits = 4; return OK; }
struct memory2 { u32 version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct device *one, struct memory2 *info) {
    ENTER_GPU(one);
    int code = memory(one, &info->total, &info->used);
    info->reserved = 559ull << 20;
    info->free = info->total - info->used - info->reserved;
    return code;
}

struct sample { struct device values; double at; };
struct metric { u32 id; int code; double value; const char *names[3]; };
struct metrics { u32 version, count; struct sample *one, *two; struct metric metrics[]; };
int nvmlGpmQueryDeviceSupport(struct device *one, u32 *support) { ENTER_GPU(one); support[1] = has_gpm; return OK; }
int nvmlGpmSampleAlloc(struct sample **sample) { ENTER(); *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(struct sample *sample) { ENTER(); free(sample); return OK; }
int nvmlGpmSampleGet(struct device *one, struct sample *sample) {
    ENTER_GPU(one);
    ONLY_WHOLE(one);
    *sample = (struct sample){*one, now_s(CLOCK_BOOTTIME)};
    return OK;
}
int nvmlGpmMigSampleGet(struct device *one, u32 instance, struct sample *sample) {
    ENTER_GPU(one);
    poisoned = poison;
    for (int i = 0; i < part_count[one->gpu]; i++)
        if ((u32)parts[one->gpu][i].instance == instance) {
            *sample = (struct sample){parts[one->gpu][i], now_s(CLOCK_BOOTTIME)};
            return OK;
        }
    return NOT_FOUND;
}
int nvmlGpmMetricsGet(struct metrics *given) {
    ENTER();
    if (given->version != 1 || given->one->at <= 0 || given->one->at >= given->two->at) return BAD;
    struct device *now = &given->two->values;
    for (u32 i = 0; i < given->count; i++) {
        struct metric *metric = &given->metrics[i];
        metric->code = OK;
        switch (metric->id) {
        case 1: metric->value = now->util; break;
        case 2: metric->value = now->sm; break;
        case 5: metric->value = now->tensor; break;
        case 10: metric->value = now->dram; break;
        case 12: metric->value = now->fp32; break;
        case 11: metric->value = 0.0 / 0.0; break; /* as a broken counter */
        case 13: metric->value = 0; break;
        case 20: case 21: metric->value = 100; break;
        default: metric->code = UNSUPPORTED;
        }
    }
    return OK;
}
#endif
