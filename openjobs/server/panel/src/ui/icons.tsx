/** Small line icons. They always stand beside a word, so they are hidden from screen readers. */

import type { ComponentChildren } from 'preact';

function Icon({ children, size = 16, cls = '' }: { children: ComponentChildren; size?: number; cls?: string }) {
  return (
    <svg class={`icon ${cls}`} width={size} height={size} viewBox="0 0 16 16" fill="none" stroke="currentColor"
      stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false">
      {children}
    </svg>
  );
}

export const Spinner = () => (
  <Icon cls="spin">
    <circle cx="8" cy="8" r="5.6" opacity=".28" />
    <path d="M8 2.4a5.6 5.6 0 0 1 5.6 5.6" />
  </Icon>
);
export const Clock = () => <Icon><circle cx="8" cy="8" r="5.7" /><path d="M8 4.8V8l2.2 1.5" /></Icon>;
export const Dots = () => <Icon><circle cx="8" cy="8" r="5.7" stroke-dasharray="2.1 2.4" /></Icon>;
export const Check = () => <Icon><circle cx="8" cy="8" r="5.7" /><path d="m5.6 8.2 1.7 1.7 3.2-3.6" /></Icon>;
export const Stopped = () => <Icon><circle cx="8" cy="8" r="5.7" /><path d="m4.2 11.8 7.6-7.6" /></Icon>;
export const Cross = () => <Icon><circle cx="8" cy="8" r="5.7" /><path d="m6.2 6.2 3.6 3.6m0-3.6L6.2 9.8" /></Icon>;
export const Question = () => <Icon><circle cx="8" cy="8" r="5.7" /><path d="M6.4 6.5a1.6 1.6 0 1 1 2.3 1.4c-.5.3-.7.6-.7 1.1M8 11v.01" /></Icon>;
export const Close = () => <Icon><path d="m4 4 8 8m0-8-8 8" /></Icon>;
export const Plus = () => <Icon><path d="M8 3v10M3 8h10" /></Icon>;
export const Search = () => <Icon><circle cx="7" cy="7" r="4.2" /><path d="m10.2 10.2 3.3 3.3" /></Icon>;
export const Bell = () => <Icon><path d="M4 11V7.2a4 4 0 0 1 8 0V11l1 1.2H3L4 11Zm2.8 3h2.4" /></Icon>;
export const BellOff = () => <Icon><path d="M4 11V7.2c0-.6.1-1.1.3-1.6M6 3.7a4 4 0 0 1 6 3.5V9m.4 3.2H3L4 11m2.8 3h2.4M2.5 2.5l11 11" /></Icon>;
export const Right = () => <Icon size={14}><path d="m6 4 4 4-4 4" /></Icon>;
export const Down = () => <Icon size={14}><path d="m4 6 4 4 4-4" /></Icon>;
export const Copy = () => <Icon><rect x="5.5" y="5.5" width="8" height="8" rx="1.5" /><path d="M10.5 5.500V4A1.500 1.500 0 0 0 9 2.500H4A1.500 1.500 0 0 0 2.500 4v5A1.500 1.500 0 0 0 4 10.500h1.500" /></Icon>;
export const Square = () => <Icon><rect x="4" y="4" width="8" height="8" rx="1.4" /></Icon>;
export const Again = () => <Icon><path d="M13 8a5 5 0 1 1-1.500-3.600M13 2.500v2.700h-2.700" /></Icon>;
export const Branch = () => <Icon><circle cx="4.500" cy="3.800" r="1.600" /><circle cx="4.500" cy="12.200" r="1.600" /><circle cx="11.500" cy="5" r="1.600" /><path d="M4.500 5.400v5.200M11.500 6.600c0 2.600-7 1.600-7 4" /></Icon>;
export const Card = () => <Icon><rect x="2.500" y="4" width="11" height="8" rx="1.500" /><path d="M5 7h6M5 9.500h3.500" /></Icon>;
export const Download = () => <Icon><path d="M8 2.800v7M5 7l3 3 3-3M3 13h10" /></Icon>;
export const Prompt = () => <Icon><path d="m3.500 5 3 3-3 3M8.500 11.500h4" /></Icon>;
export const Warn = () => <Icon><path d="M8 2.800 14 13H2L8 2.800ZM8 6.800v2.700M8 11.400v.01" /></Icon>;
export const Arrow = () => <Icon><path d="M8 3v9m-3.500-3.500L8 12l3.500-3.500" /></Icon>;
